"""Plays a recorded run of a benchmark client: prints what it printed, leaves what it left; it measures nothing.

`python playback.py RECORDING RESULT [OPTIONS OF THE CLIENT]`: RECORDING is the path of the recorded result, whose text
lies beside it. The options are ignored.
"""

import shutil
import sys
from pathlib import Path


def main() -> None:
    recording, result = Path(sys.argv[1]), Path(sys.argv[2])
    for line in recording.with_suffix(".txt").read_text().splitlines():
        print(line)
    shutil.copyfile(recording, result)


if __name__ == "__main__":
    main()
