"""``python -m tinynccl`` and ``tinynccl``: starts tinynccl-cli, which wheels carry beside the libraries that it works with.

``python -m tinynccl libraries`` prints their folder: libnccl.so.2, the network plugin of NVIDIA's NCCL, libibverbs.so.1.
"""

import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).with_name("_native")


def main() -> int:
    program = FOLDER / "tinynccl-cli"
    if not program.is_file():
        print(
            f"error: {program} is not there: this package was built without it. scripts/wheel.sh of the sources builds a wheel "
            "that has it; `cargo run -p tinynccl-cli` starts it from there",
            file=sys.stderr,
        )
        return 77
    arguments = sys.argv[1:]
    if arguments == ["libraries"]:
        print(FOLDER)
        return 0
    sys.stdout.flush()
    os.execv(program, [str(program), *arguments])


if __name__ == "__main__":
    sys.exit(main())
