"""``python -m mooncake_kernels drop-in``: other projects' import names resolve to our packages.

``enable mooncake`` makes ``import mooncake.engine`` give
``mooncake_serving.compat.mooncake.engine`` in every process of this interpreter's environment, so
that engines run on us unchanged. It writes, next to the installed packages, a folder per name and a
``.pth`` file that puts it on ``sys.path``::

    mooncake_kernels_drop_in_mooncake.pth
    mooncake_kernels_drop_in_mooncake/mooncake/                     modules of a few lines
    mooncake_kernels_drop_in_mooncake/mooncake_transfer_engine-*.dist-info/   version, RECORD

These are not among the files of installed packages, because wheels of several names have a package
``mooncake``, and one that is installed later would replace some of the files and be mixed with the
rest. In a folder of their own ours are either all in effect or not at all, and ``--over-installed``
differs only in the place of the folder in ``sys.path``: first instead of last. Nor is it an import
hook, so that ``find_spec`` and ``importlib.metadata`` answer as for any package.

Nothing here imports what the names stand for: a drop-in is files, and says so itself if the
packages behind it are gone.
"""

import argparse
import base64
import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .errors import Unavailable

FOLDER = "mooncake_kernels_drop_in_"
INSTALLER = "mooncake-kernels"
OP = "drop-in"
_LOCAL = "+mooncake.kernels"  # the local part of the versions, so that no one takes ours for theirs
_CHECK_S = 300
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Target:
    """A package that others import, and what stands in for it.

    Attributes:
        name: as it is imported.
        distribution: that brings it, whose name and version ``importlib.metadata`` finds.
        version: the one whose API ours is.
        package: ours.
        modules: those that others import; of ``optional`` those that ours has.
        optional: further modules.
        commands: what launch scripts call, next to the interpreter, and the module that it runs.
    """

    name: str
    distribution: str
    version: str
    package: str
    modules: tuple[str, ...]
    optional: tuple[str, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()

    def is_of(self, distribution: str) -> bool:
        """Whether a distribution of this name brings the package, or a part of it."""
        known = re.sub(r"[-_.]+", "-", distribution).lower()
        return known == self.distribution or known.startswith(f"{self.distribution}-")


TARGETS = {
    target.name: target
    for target in (
        Target(
            "mooncake",
            "mooncake-transfer-engine",
            "0.3.13.post1",
            "mooncake_serving.compat.mooncake",
            ("engine", "store", "mooncake_config"),
            commands=(("mooncake_master", "mooncake_serving.compat.mooncake.master"),),
        ),
        Target(
            "nixl",
            "nixl",
            "1.5.1",
            "mooncake_serving.compat.nixl",
            ("_api", "_bindings"),
            ("_utils", "logging"),
        ),
    )
}

_PACKAGE = '''"""{name} by mooncake-kernels; to remove it:

    python -m mooncake_kernels drop-in disable {name}
"""

import importlib
import os
import shlex

try:
    _ours = importlib.import_module("{package}")
except ModuleNotFoundError as _missing:
    if not "{package}.".startswith(f"{{_missing.name}}."):
        raise
    _folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    raise ModuleNotFoundError(
        "{name} is a drop-in of mooncake-kernels, which is not installed here any more; to remove "
        f"it: rm -r {{shlex.quote(_folder)}} {{shlex.quote(_folder + '.pth')}}",
        name=__name__,
    ) from None
globals().update({{name: value for name, value in vars(_ours).items() if name[0] != "_"}})
for _name in {all_modules}:
    globals()[_name] = importlib.import_module(f"{package}.{{_name}}")
'''

_MODULE = '''"""See __init__.py."""

import sys

import {package}.{module} as _ours

sys.modules[__name__] = _ours
'''

_OURS = "# Written by mooncake-kernels;"
_COMMAND = (
    f"#!/bin/sh\n{_OURS} "
    """to remove it: python -m mooncake_kernels drop-in disable {name}
exec {python} -m {module} "$@"
"""
)

_METADATA = """Metadata-Version: 2.1
Name: {distribution}
Version: {version}
Summary: The import name {name}, which resolves to {package} of mooncake-kernels
Requires-Dist: mooncake-kernels
"""


class DropIn:
    """The drop-in of a package in a folder of installed packages."""

    def __init__(self, target: Target, site: Path):
        self.target = target
        self.site = site
        self.folder = site / f"{FOLDER}{target.name}"
        self.pth = site / f"{FOLDER}{target.name}.pth"
        own = f"{target.name}.{os.getpid()}"
        self._new, self._new_pth = site / f".{FOLDER}{own}", site / f".{FOLDER}{own}.pth.new"
        self._old, self._old_pth = site / f".{FOLDER}{own}.old", site / f".{FOLDER}{own}.pth.old"
        self._is_in_place = False  # what ``write`` wrote
        self.bin = Path(sys.executable).parent

    def is_written(self) -> bool:
        """Whether there is anything of it."""
        return self.folder.exists() or self.pth.exists()

    def pth_text(self, *, goes_first: bool) -> str:
        """What puts the folder on ``sys.path``: behind all others, or before them."""
        if goes_first:
            return f"import sys; sys.path.insert(0, {str(self.folder)!r})\n"
        return f"{self.folder.name}\n"

    def goes_first(self) -> bool:
        """Whether it was written to precede installed packages."""
        try:
            return self.pth.read_text().startswith("import ")
        except OSError:
            return False

    def is_up_to_date(self, *, goes_first: bool) -> bool:
        """Whether it is there as ``write`` would write it."""
        try:
            return self.pth.read_text() == self.pth_text(goes_first=goes_first) and all(
                (self.folder / name).read_text() == text and _is_for_all(self.folder / name)
                for name, text in self._files().items()
            )
        except OSError:
            return False

    def write(self, *, goes_first: bool) -> None:
        """Write it: the folder as a whole, and then what makes it effective.

        What was there before is put aside: ``undo`` brings it back, ``keep`` removes it.

        Raises:
            OSError: that is not possible, and what was there before is there again.
        """
        try:
            for name, text in self._files().items():
                (self._new / name).parent.mkdir(parents=True, exist_ok=True)
                (self._new / name).write_text(text)
            self._new_pth.write_text(self.pth_text(goes_first=goes_first))
            for path in (self._new, *self._new.rglob("*"), self._new_pth):  # whatever the umask
                path.chmod(0o755 if path.is_dir() else 0o644)
            for current, old in ((self.pth, self._old_pth), (self.folder, self._old)):
                if current.exists():
                    current.rename(old)
            self._new.rename(self.folder)
            self._is_in_place = True
            self._new_pth.rename(self.pth)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put back what ``write`` has replaced, as far as it has come."""
        shutil.rmtree(self._new, ignore_errors=True)
        for current, old in ((self.pth, self._old_pth), (self.folder, self._old)):
            with contextlib.suppress(OSError):
                if old.exists() or self._is_in_place:
                    _remove(current)
                if old.exists():
                    old.rename(current)
        self._new_pth.unlink(missing_ok=True)

    def keep(self) -> None:
        """Remove what ``write`` has replaced."""
        for old in (self._old_pth, self._old):
            _remove(old)

    def commands(self) -> dict[str, tuple[Path | None, bool]]:
        """The file that each command of the package is, if there is one, and whether it is ours."""
        found = {}
        for name, _ in self.target.commands:
            file: Path | None = self.bin / name
            if not self.bin.joinpath(name).exists():
                other = shutil.which(name)
                file = Path(other) if other else None
            found[name] = file, file is not None and _is_our_command(file)
        return found

    def write_commands(self) -> list[str]:
        """Write the commands, but not over nor before those of others; returns what was done.

        Raises:
            OSError: one cannot be written.
        """
        lines = []
        for command, module in self.target.commands:
            found, is_ours = self.commands()[command]
            if found and not is_ours:
                lines.append(
                    f"{command}: {found} is of others, and stays: use python -m {module}\n"
                )
                continue
            python = shlex.quote(sys.executable)
            new = self.bin / f".{command}.{os.getpid()}"
            try:
                new.write_text(_COMMAND.format(python=python, module=module, **vars(self.target)))
                new.chmod(0o755)
                new.rename(self.bin / command)
            finally:
                new.unlink(missing_ok=True)
            lines.append(f"{command}: {self.bin / command} runs {module}\n")
        return lines

    def remove_commands(self) -> list[str]:
        """Remove what ``write_commands`` wrote; returns what was done.

        Raises:
            OSError: a command cannot be removed.
        """
        files = [self.bin / name for name, _ in self.target.commands]
        ours = [file for file in files if _is_our_command(file)]
        for file in ours:
            file.unlink(missing_ok=True)
        return [f"{file.name}: removed {file}\n" for file in ours]

    def foreign(self) -> list[Path]:
        """The files in the folder that others wrote."""
        ours = {self.folder / name for name in self._recorded()}
        return sorted(
            path for path in self.folder.rglob("*")
            if not path.is_dir() and path not in ours and path.parent.name != "__pycache__"
        )  # fmt: skip

    def remove(self) -> list[Path]:
        """Remove what was written, and what Python compiled from it; returns what else is there.

        Raises:
            OSError: something cannot be removed.
        """
        self.pth.unlink(missing_ok=True)
        files = [self.folder / name for name in self._recorded()]
        for file in files:
            file.unlink(missing_ok=True)
            for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
                compiled.unlink(missing_ok=True)
        folders = {file.parent for file in files}
        folders |= {folder / "__pycache__" for folder in folders}
        for folder in sorted(folders, key=lambda one: len(one.parts), reverse=True):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return sorted(self.folder.rglob("*")) if self.folder.exists() else []

    @property
    def _info(self) -> str:
        name = self.target.distribution.replace("-", "_")
        return f"{name}-{self.target.version}{_LOCAL}.dist-info"

    def _files(self) -> dict[str, str]:
        """Names and texts of the files of the folder."""
        target = self.target
        modules = *target.modules, *(m for m in target.optional if _is_there(target.package, m))
        package = _PACKAGE.format(all_modules=modules, **vars(target))
        files = {f"{target.name}/__init__.py": package}
        for module in modules:
            text = _MODULE.format(package=target.package, module=module)
            files[f"{target.name}/{module}.py"] = text
        about = {**vars(target), "version": target.version + _LOCAL}
        files[f"{self._info}/METADATA"] = _METADATA.format(**about)
        files[f"{self._info}/INSTALLER"] = f"{INSTALLER}\n"
        files[f"{self._info}/top_level.txt"] = f"{target.name}\n"
        # As of any package, so that `pip uninstall` removes it, too.
        lines = [f"{name},{_digest(text)},{len(text.encode())}" for name, text in files.items()]
        lines += [f"../{self.pth.name},,", f"{self._info}/RECORD,,"]
        lines += [
            f"{os.path.relpath(self.bin / command, self.folder)},,"
            for command, (found, is_ours) in self.commands().items()
            if is_ours or not found
        ]
        files[f"{self._info}/RECORD"] = "".join(f"{line}\n" for line in lines)
        return files

    def _recorded(self) -> list[str]:
        """The files of the folder that its RECORDs list, whatever version wrote them."""
        names = []
        for record in self.folder.glob("*.dist-info/RECORD"):
            names += [line.split(",")[0] for line in record.read_text().splitlines()]
        return [name for name in names if not name.startswith(("/", ".."))]


def enable(names: Sequence[str], *, over_installed: bool, site: Path) -> str:
    """Make the names resolve to our packages; says what was done.

    Raises:
        Unavailable: a package of that name is installed, ours is not, or a new process does not
            find it; then nothing was changed.
        OSError: the folder of installed packages cannot be written to.
    """
    drop_ins = [DropIn(TARGETS[name], site) for name in names]
    for drop_in in drop_ins:
        _check_ours(drop_in.target)
        if not over_installed and (found := _installed(drop_in)):
            raise Unavailable(
                f"{OP} enable: {drop_in.target.name} must not be installed, got {found}: uninstall "
                "it, or give --over-installed to leave it there, unused"
            )
    written, lines = [], []
    changed = [one for one in drop_ins if not one.is_up_to_date(goes_first=over_installed)]
    for drop_in in changed:
        if foreign := drop_in.foreign():
            raise Unavailable(
                f"{OP} enable: {drop_in.folder} must have no files of others to be replaced, got "
                f"{', '.join(map(str, foreign)):.400}: move them away"
            )
    try:
        for drop_in in drop_ins:
            name = drop_in.target.name
            if drop_in not in changed:
                lines.append(f"{name}: was enabled already\n")
                continue
            drop_in.write(goes_first=over_installed)
            written.append(drop_in)
            lines.append(f"{name}: enabled, {drop_in.target.package} by {drop_in.folder}\n")
        _check_found([drop_in.target for drop_in in drop_ins])
        for drop_in in drop_ins:
            lines += drop_in.write_commands()
    except BaseException as error:
        for drop_in in reversed(written):
            drop_in.undo()
        if not isinstance(error, (OSError, Unavailable)):
            raise
        raise _explained("enable", site, error) from None
    for drop_in in written:
        drop_in.keep()
    return "".join(lines)


def disable(names: Sequence[str], site: Path) -> str:
    """Remove what ``enable`` wrote; says what was done.

    Raises:
        OSError: it cannot be removed.
    """
    lines = []
    for name in names:
        drop_in = DropIn(TARGETS[name], site)
        try:
            lines += drop_in.remove_commands()
        except OSError as error:
            raise _explained("disable", drop_in.bin, error) from None
        if not drop_in.is_written():
            of = _drop_in_of(drop_in.target, _find(name, sys.path))
            where = f" in this environment, but is by {of}" if of else ""
            lines.append(f"{name}: was not enabled{where}\n")
            continue
        try:
            left = drop_in.remove()
        except OSError as error:
            raise _explained("disable", site, error) from None
        lines.append(f"{name}: disabled\n")
        if left:
            lines.append(f"{name}: left, as others wrote it: {', '.join(map(str, left))}\n")
    return "".join(lines)


def status(names: Sequence[str], site: Path) -> str:
    """Say what importing each name gives, by which file and version."""
    return "".join(_status_of(DropIn(TARGETS[name], site)) for name in names)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command ``drop-in``."""
    summary = "let `import mooncake` and `import nixl` give this project's packages"
    parser = commands.add_parser("drop-in", help=summary, description=summary)
    actions = parser.add_subparsers(dest="action", required=True)
    what: dict[str, Any] = {"type": _name, "metavar": "NAME", "help": " or ".join(TARGETS)}
    enabling = actions.add_parser("enable", help="in the environment of this interpreter")
    enabling.add_argument("names", nargs="+", **what)
    enabling.add_argument(
        "--over-installed", action="store_true", help="even if a package of that name is installed"
    )
    for action, text in (("disable", "remove what enable wrote"), ("status", "say what is found")):
        parser = actions.add_parser(action, help=f"{text}; all names if none is given")
        parser.add_argument("names", nargs="*", **what)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    site = Path(sysconfig.get_path("purelib"))
    names = list(dict.fromkeys(options.names)) or [*TARGETS]
    if options.action == "enable":
        sys.stdout.write(enable(names, over_installed=options.over_installed, site=site))
    elif options.action == "disable":
        sys.stdout.write(disable(names, site))
    else:
        sys.stdout.write(status(names, site))
    return 0


def _name(text: str) -> str:
    if text not in TARGETS:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(TARGETS)}, got {text!r:.80}")
    return text


def _status_of(drop_in: DropIn) -> str:
    target = drop_in.target
    found = _find(target.name, sys.path)
    if found is None:
        said = "nothing: it cannot be imported"
    elif of := _drop_in_of(target, found):
        said = f"{target.package} of mooncake-kernels, by {found}"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(target.distribution)
            said += f", which says it is {target.distribution} {version}"
        if brought := _brought_by(target):
            said += f"; it precedes {brought}"
        if not _is_there(target.package):
            said += f"; importing it fails, for {target.package} is not installed"
        if not _is_inside(found, drop_in.folder):
            said += f"; it was enabled in another environment, by {of}"
    else:
        said = f"{_brought_by(target) or 'a package that is not ours'}, by {found}"
    lines = [f"{target.name}: {said}\n"]
    if drop_in.is_written() and _drop_in_of(target, found) is None:
        lines.append(
            f"{target.name}: the drop-in in {drop_in.folder} is not in effect: enable it again, "
            "with --over-installed to precede what is installed, or disable it\n"
        )
    for command, (file, is_ours) in drop_in.commands().items():
        whose = "mooncake-kernels" if is_ours else "others"
        lines.append(f"{command}: {f'{file}, of {whose}' if file else 'nothing'}\n")
    return "".join(lines)


def _installed(drop_in: DropIn) -> str:
    """What brings a package of this name, other than the drop-in; "" if nothing does."""
    if brought := _brought_by(drop_in.target):
        return brought
    outside = [path for path in sys.path if Path(path or ".").resolve() != drop_in.folder.resolve()]
    found = _find(drop_in.target.name, outside)
    # That of an environment which this one sees, as a system's, gives our package, too.
    return "" if found is None or _drop_in_of(drop_in.target, found) else found


def _drop_in_of(target: Target, found: str | None) -> Path | None:
    """The folder of the drop-in that a file is of, in whichever environment; None if it is not."""
    folder = Path(found or "").parent.parent
    if folder.name != f"{FOLDER}{target.name}":
        return None
    installers = folder.glob("*.dist-info/INSTALLER")
    return folder if any(one.read_text().strip() == INSTALLER for one in installers) else None


def _brought_by(target: Target) -> str:
    """Name, version and folder of an installed distribution of the package that is not ours."""
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"] or ""
        if target.is_of(name) and (one.read_text("INSTALLER") or "").strip() != INSTALLER:
            return f"{name} {one.version} in {one.locate_file('')}"
    return ""


def _find(name: str, path: Sequence[str]) -> str | None:
    """The file by which a package would be imported; None if it would not."""
    spec = PathFinder.find_spec(name, [*path])
    if spec is None:
        return None
    return spec.origin or str(next(iter(spec.submodule_search_locations or ()), name))


def _check_ours(target: Target) -> None:
    missing = [module for module in target.modules if not _is_there(target.package, module)]
    if missing:
        raise Unavailable(
            f"{OP} enable: {target.package} must be installed for {target.name}, and has no "
            f"{', '.join(missing)}"
        )


def _check_found(targets: Sequence[Target]) -> None:
    """Import the names in a new process, as an engine would."""
    wanted = [f"{target.name}.{module}" for target in targets for module in target.modules]
    code = f"import importlib\nfor name in {wanted}: importlib.import_module(name)\n"
    code += f"import sys, json\nprint(json.dumps([sys.modules[n].__name__ for n in {wanted}]))"
    command = [sys.executable, "-c", code]
    ours = [f"{target.package}.{module}" for target in targets for module in target.modules]
    try:
        # In another folder: what is found only in this one is not found by an engine.
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{OP} enable: the imports did not end within {_CHECK_S} s") from None
    got = done.stdout.splitlines()[-1:] or [""]
    if done.returncode or got[0] != json.dumps(ours):
        why = (done.stderr.strip().splitlines() or ["another package precedes it"])[-1]
        raise Unavailable(
            f"{OP} enable: a new process of {sys.executable} must be able to import "
            f"{', '.join(wanted)}, and is not ({why}); nothing was changed"
        )


def _explained(action: str, site: Path, error: Exception) -> Exception:
    """The same error, or what to do about it."""
    if not isinstance(error, OSError) or error.errno not in _NO_RIGHT:
        return error
    return Unavailable(
        f"{OP} {action}: this user must be able to write to {site} ({error.strerror}): run it as "
        "its owner, or in an environment of your own (python -m venv --system-site-packages DIR)"
    )


def _is_there(package: str, module: str = "__init__") -> bool:
    """Whether a module of a package can be imported; imports nothing."""
    top, *folders = package.split(".")
    spec = importlib.util.find_spec(top)
    places = [] if spec is None else spec.submodule_search_locations or []
    inside = [Path(place, *folders, module) for place in places]
    return any(
        one.with_suffix(".py").is_file() or (one / "__init__.py").is_file() for one in inside
    )


def _is_inside(file: str, folder: Path) -> bool:
    return folder.resolve() in Path(file).resolve().parents


def _is_our_command(file: Path) -> bool:
    try:
        return _OURS in file.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _is_for_all(file: Path) -> bool:
    """Whether every user may read it."""
    return file.stat().st_mode & 0o444 == 0o444 and file.parent.stat().st_mode & 0o555 == 0o555


def _remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
