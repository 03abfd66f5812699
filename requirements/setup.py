"""Create a virtual environment, and say what comes and how far it is: `make setup`.

`python requirements/setup.py ENVIRONMENT ARGUMENTS...` creates that folder, and hands the arguments to
`uv pip install`. Where there is no terminal, uv shows no progress, and this prints a line every few seconds.
"""

import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

MAIN = Path(".venv")
LOCK = Path(__file__).parent / "constraints.txt"
_FIGURES = {True: "# Measured by `make lock`: ", False: "# Measured by `make lock`, without vLLM: "}
"""What the lock file says before the figures of an environment, with and without vLLM."""
_IMPORTED = {
    True: "examples.demo.__main__, vllm.entrypoints.openai.api_server, vllm.v1.engine.core",
    False: "examples.demo.training, patchstore.cli.main",
}
"""What is compiled here: with vLLM 5,479 files of 30,851. Python compiles others when it imports them."""
HEARTBEAT_S = 5.0


def main() -> int:
    """Create an environment, or print what one holds; return the exit status."""
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    environment, arguments = Path(sys.argv[1]), sys.argv[2:]
    if arguments == ["--figures"]:
        vllm = "vllm" in sizes(environment)
        print(f"{_FIGURES[vllm]}{figures(environment)}")
        return 0
    began = time.monotonic()
    try:
        if environment == MAIN:
            announce(vllm=any("vllm" in each for each in arguments))
        create(environment, arguments)
    except subprocess.CalledProcessError as exc:
        command = " ".join(map(str, exc.cmd))
        say(f"{environment} is not complete, status {exc.returncode} of: {command}")
        say("the reason is above; then run the same again, which goes on from here")
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; {environment} is not complete: run the same again, which goes on from here")
        return 130
    say(f"{environment} is complete after {time.monotonic() - began:.0f} s: {figures(environment)}")
    return 0


def announce(*, vllm: bool) -> None:
    """Say what comes, before the first of it."""
    label = _FIGURES[vllm]
    (measured,) = (line for line in LOCK.read_text().splitlines() if line.startswith(label))
    (size_mb,) = re.findall(r"([\d,]+) MB", measured)
    # Wheels are compressed: 1,340 MB for 3,998 MB.
    download_mb = int(size_mb.replace(",", "")) // 3
    included = "vLLM and torch for CPUs included" if vllm else "with torch for CPUs, without vLLM"
    say(f"creates {MAIN} with all that runs, tests and checks patchstore, {included}")
    say(measured.removeprefix(label))
    say(
        f"of it uv downloads what its cache lacks, at most some {download_mb:,} MB: "
        f"{download_mb * 8 / 100 / 60:.0f} minutes at 100 Mbit/s. All else takes a minute or two on two cores"
    )


def create(environment: Path, arguments: list[str]) -> None:
    """Create an environment, install into it, and compile what is imported in any case.

    Raises:
        subprocess.CalledProcessError: a program failed. Running this again goes on from there.
    """
    python, uv = environment / "bin" / "python", MAIN / "bin" / "uv"
    creating = f"creating {environment}"
    if environment == MAIN:
        if not python.exists():
            run(creating, sys.executable, "-m", "venv", environment)
        if not uv.exists():
            run("installing uv", python, "-m", "pip", "install", "--quiet", "uv")
    else:
        main = MAIN / "bin" / "python"
        run(creating, uv, "venv", "--quiet", "--allow-existing", "--python", main, environment)
    run(f"installing into {environment}", uv, "pip", "install", "--python", python, *arguments)
    if environment == MAIN:
        # Python keeps compiled what it imports. Containers often set PYTHONDONTWRITEBYTECODE: then each of
        # hundreds of processes would compile all of torch and vLLM, 13 s instead of 6 for one import of vLLM.
        imported = _IMPORTED["vllm" in sizes(environment)]
        code = f"import sys; sys.dont_write_bytecode = False; import {imported}"
        run(f"compiling what is imported first: {imported}", python, "-c", code, quiet=True)


def run(doing: str, *command: str | Path, quiet: bool = False) -> None:
    """Run a program; where there is no terminal, say every few seconds that it goes on.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    say(doing)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        output = log if quiet else None
        with subprocess.Popen(command, stdout=output, stderr=output) as program:
            while True:
                try:
                    status = program.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    if quiet or not sys.stdout.isatty():
                        say(f"{doing}: {time.monotonic() - began:.0f} s so far{written(program.pid)}")
        if status:
            log.seek(0)
            print(log.read(), end="")
            raise subprocess.CalledProcessError(status, command)


def written(process: int) -> str:
    """Say how many bytes a program wrote, as uv unpacks into its cache; nothing where that is not known."""
    try:
        counts = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    except OSError:
        return ""
    return f", {int(counts['wchar']) / 1e6:,.0f} MB written"


def figures(environment: Path) -> str:
    """Count what is installed, and name the largest."""
    found = sizes(environment)
    largest = sorted(found, key=found.__getitem__, reverse=True)[:4]
    named = ", ".join(f"{name} {found[name] / 1e6:,.0f}" for name in largest)
    return f"{len(found)} packages, {sum(found.values()) / 1e6:,.0f} MB on disk (of it {named})"


def sizes(environment: Path) -> dict[str, int]:
    """Return the bytes of each installed package, as it records them: without what Python compiled since."""
    (site,) = environment.glob("lib/python*/site-packages")
    return {
        found.name: sum(file.size or 0 for file in found.files or ())
        for found in metadata.distributions(path=[str(site)])
    }


def say(what: str) -> None:
    print(f"setup: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
