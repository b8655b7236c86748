# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp export CKPT DIR``: a checkpoint's weights as safetensors in the Hugging Face layout."""

from __future__ import annotations

import argparse
import sys

from zeropp.checkpoint.offline import DTYPES, export
from zeropp.cli import refuse
from zeropp.errors import ConfigError, Error, counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``export``."""
    parser.add_argument("checkpoint", help="a folder that zeropp.save wrote to, or one step-* folder in it")
    parser.add_argument("folder", help="where the safetensors files go")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters; default: what each computes in")
    parser.add_argument(
        "--file-bytes",
        type=int,
        default=2 << 30,
        metavar="N",
        help="largest file, default 2 GiB; more files get an index",
    )


def run(options: argparse.Namespace) -> int:
    """Write the files and say what was written. Exit status: 0 written, 1 no good checkpoint or no room, 2 an option is wrong."""
    try:
        done = export(options.checkpoint, options.folder, dtype=options.dtype, file_bytes=options.file_bytes)
    except ConfigError as error:
        return refuse("export", error)
    except Error as error:
        return refuse("export", error, status=1)
    for folder, wrong in done["damaged"].items():
        print(f"python -m zeropp export: {folder} is damaged and was passed over: {wrong}", file=sys.stderr)
    print(
        f"{done['path']}: {counted(done['tensors'], 'tensor')}, {done['bytes']:,} bytes, in {counted(len(done['files']), 'file')} "
        f"of {options.folder}; the model's own config.json is not in a "
        "checkpoint: add it for transformers"
    )
    return 0
