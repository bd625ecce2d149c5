"""Every decision, pure: values in, values out, time and randomness as arguments."""
