"""Generate clients/python/kvplane/v1 from proto/, or check that what is committed is up to date.

    python scripts/gen_proto.py            write the generated code
    python scripts/gen_proto.py --check    compare, and name the files that differ (exit 1)

The tools have environments of their own below .tools/proto, made on first use. Code from grpcio-tools 1.71
(protobuf 5.29) imports on every later protobuf, code from newer tools does not import on an older one; the
typing plugin needs a newer protobuf than that, and neither need be what the project runs with. The versions
are exact because the output depends on them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PROTOC = ("grpcio-tools==1.71.2", "grpcio==1.71.2", "protobuf==5.29.6")
STUBS = ("mypy-protobuf==5.1.0", "protobuf==6.33.6")
PACKAGE = Path("kvplane/v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def environment(home: Path, requirements: tuple[str, ...]) -> Path:
    """Return the bin folder of an environment with these requirements; create it if missing or outdated."""
    stamp, wanted = home / "requirements.txt", "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        sys.stdout.write(f"creating an environment with {', '.join(requirements)}\n")
        sys.stdout.flush()
        venv.create(home, clear=True, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
        subprocess.run([*pip, "install", "--quiet", "--disable-pip-version-check", *requirements], check=True)
        stamp.write_text(wanted)
    return home / "bin"


def generate(root: Path, tools: Path, out: Path) -> None:
    """Write the code for every file of proto/kvplane/v1 below `out`: messages, stubs, and typing for both."""
    protos = sorted((root / "proto" / PACKAGE).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no .proto file in {root / 'proto' / PACKAGE}")
    tools = tools.resolve()  # scripts of an environment have its path in their first line
    python = environment(tools / "protoc", PROTOC) / "python"
    plugin = environment(tools / "stubs", STUBS) / "protoc-gen-mypy_grpc"
    command = [str(python), "-m", "grpc_tools.protoc", f"-I{root / 'proto'}"]
    command += [f"--plugin=protoc-gen-mypy_grpc={plugin}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    command += [f"--mypy_grpc_out=quiet:{out}"]
    subprocess.run([*command, *map(str, protos)], check=True)


def generated_files(package: Path) -> dict[str, bytes]:
    """Return name → content of the generated files in a folder (none when the folder is missing)."""
    return {path.name: path.read_bytes() for pattern in GENERATED for path in package.glob(pattern)}


def differences(fresh: dict[str, bytes], committed: dict[str, bytes]) -> list[str]:
    """Return one line per generated file that is missing, left over or different."""
    lines = [f"missing: {name}" for name in sorted(fresh.keys() - committed.keys())]
    lines += [f"left over, its .proto is missing: {name}" for name in sorted(committed.keys() - fresh.keys())]
    both = sorted(fresh.keys() & committed.keys())
    return lines + [f"differs: {name}" for name in both if fresh[name] != committed[name]]


def replace(package: Path, fresh: dict[str, bytes]) -> None:
    """Replace the generated files of `package` by `fresh`; keep files written by hand."""
    package.mkdir(parents=True, exist_ok=True)
    for name in generated_files(package).keys() - fresh.keys():
        (package / name).unlink()
    for name, content in fresh.items():
        (package / name).write_bytes(content)


def main() -> int:
    """Run the command; the exit status is 1 when --check finds a difference."""
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with what is committed, write nothing")
    parser.add_argument("--root", type=Path, default=here, help="the repository to work on")
    options = parser.parse_args()

    package = options.root / "clients" / "python" / PACKAGE
    scratch = Path(tempfile.mkdtemp(prefix="kvplane-proto-"))
    try:
        generate(options.root, here / ".tools" / "proto", scratch)
        fresh = generated_files(scratch / PACKAGE)
    finally:
        shutil.rmtree(scratch)

    if not options.check:
        replace(package, fresh)
        sys.stdout.write(f"wrote {len(fresh)} files to {package}\n")
        return 0
    lines = differences(fresh, generated_files(package))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if lines:
        sys.stdout.write("generated code does not match proto/: run `make proto` and commit the result\n")
    else:
        sys.stdout.write(f"generated code matches proto/ ({len(fresh)} files)\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
