"""`laminar inspect RUN audit | prompt ID | trajectory ID | dropped`: what became of each trajectory."""
