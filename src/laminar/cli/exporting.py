"""`laminar export`: the trained model as a Hugging Face folder."""

import shutil
import sys
from pathlib import Path

from laminar.schema.errors import UserError


def export(run: Path, folder: Path, *, replace: bool = False) -> None:
    """Copy the model of the newest checkpoint; an existing folder is refused unless `replace`."""
    from laminar.cluster.run_folder import CHECKPOINTS
    from laminar.trainer.checkpoints import complete_checkpoints, export_hf

    found = complete_checkpoints(run / CHECKPOINTS)
    if not found:
        raise UserError(f"{run} has no complete checkpoint to export; give the --out folder of a run")
    if replace and folder.exists():
        shutil.rmtree(folder)
    export_hf(found[-1].path, folder)
    sys.stdout.write(f"model    {folder} (version {found[-1].step})\n")
