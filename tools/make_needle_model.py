"""Make the model of ``engine/needle.py``: ``python -m kvstore.tools.make_needle_model --seed S --out DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.core.errors import InvalidArgument
from kvstore.engine.needle import make_needle_model


def main(
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it is made, and files of it are replaced.")],
    seed: Annotated[int, typer.Option("--seed", help="Of the embeddings.", min=0)] = 1,
) -> None:
    """Write a decoder that answers "key value ... key" with the value, from any distance (27 MB, float32)."""
    try:
        margin = make_needle_model(out, seed)
    except (InvalidArgument, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{out}: other tokens weigh at most exp(-{margin:.0f}) of the right one each", err=True)


if __name__ == "__main__":
    typer.run(main)
