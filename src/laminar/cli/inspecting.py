"""`laminar inspect audit RUN | prompt RUN ID | trajectory RUN ID | dropped RUN`: what became of each trajectory."""

import typer

app = typer.Typer(help="What became of each prompt and trajectory of a run, live or dead.", no_args_is_help=True)


@app.command()
def audit(run: str) -> None: ...
