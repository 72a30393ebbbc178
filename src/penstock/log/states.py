"""The places where states lie: a folder of this machine, or any place that fsspec reaches; and the states still needed.

A state is whole before its name exists. A process that is killed while writing leaves a file whose name ends in
``.partial``, or nothing in an object store. Neither is ever taken for a state.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from penstock.errors import StudyError

if TYPE_CHECKING:
    from penstock.log.history import History, TrialRecord
    from penstock.trial import StateRef

NAME = re.compile(r"\d+-\d+-\d+\.pt(\.partial)?")  # see `prefix`: files with other names are left alone
FEW = 64  # bytes that reach a file in one call or not at all
# Protocols of object stores: they put a file whole or not at all.
OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos"))


class States(ABC):
    """The states in one place. The object holds a path and no open file: it is cheap to make and to send to workers.

    >>> states = States.of("memory://guide")
    >>> states.write("000000-1-6.pt", b"tensors")
    >>> states.names(), states.size("000000-1-6.pt"), states.size("000001-1-6.pt")
    (['000000-1-6.pt'], 7, None)
    """

    @staticmethod
    def of(place: States | Path | str) -> States:
        """The states in a folder or at a URL; a relative path starts from the current directory."""
        if isinstance(place, States):
            return place
        if isinstance(place, Path) or (isinstance(place, str) and place and "://" not in place):
            if re.match(r"\w{2,}:/", str(place)):  # Path turns the "://" of a URL into ":/"
                raise StudyError(f"states must be a folder, or a URL as text such as 's3://bucket', got {place!r}.")
            return Folder(Path(place).absolute())
        if not isinstance(place, str) or not place or "::" in place:
            raise StudyError(f"states must be a folder or one URL, such as 's3://bucket/penstock', got {place!r}.")
        protocol, _, path = place.partition("://")
        if protocol not in ("file", "local"):
            return Store(place.rstrip("/"))
        if not path.startswith("/"):
            raise StudyError(f"A {protocol}:// URL has a whole path, as in file:///mnt/shared, got {place!r}.")
        return Folder(Path(path))  # states in a folder of this machine are renamed and synced; fsspec would not do so

    @staticmethod
    def of_study(dir: Path, place: Path | str | None, home: str | None = None) -> States:
        """The states of the study in ``dir``: in the study's own folder, or under ``place`` by the study's name.

        ``home`` is the name of the folder there where it is another one, as the log says (``log/owners.py``).
        """
        return States.of(dir / "states") if place is None else States.of(place).under(home or dir.name)

    @abstractmethod
    def under(self, name: str) -> States:
        """The place of that name inside this one."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The path or the URL of a state, for messages."""

    @abstractmethod
    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a state, whole before its name exists; raises a StudyError where that cannot be done."""

    @abstractmethod
    def read(self, name: str) -> BinaryIO:
        """A state's content, as a file to be closed."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """How many bytes a state has; None where there is no such state, a StudyError where nobody can say."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all states, also of states that were cut short."""

    @abstractmethod
    def delete(self, *names: str) -> None:
        """Delete states; a state that is already gone is no error. A StudyError says why one could not be deleted."""

    @abstractmethod
    def sync(self, name: str) -> None:
        """Make a state survive a power loss, where the place does not do so by itself.

        Raises a FileNotFoundError where the state is gone, and a StudyError where it cannot be made durable.
        """

    def probe(self) -> None:
        """Write, read and delete a small file; where that fails, one error says what to do."""
        name = f"probe-{secrets.token_hex(4)}"
        try:
            self.write(name, name.encode())
            try:
                with self.read(name) as file:
                    back = file.read()
            finally:
                self.delete(name)
        except StudyError:
            raise
        except Exception as error:
            raise StudyError(_unreached(self, error)) from None
        if back != name.encode():
            raise StudyError(f"Expected to read from {self} what was written there, got {back!r}: {OTHERWISE}")


@dataclass(frozen=True)
class Folder(States):
    """States in a folder of this machine, local or mounted."""

    dir: Path

    def __str__(self) -> str:
        return str(self.dir)

    def under(self, name: str) -> States:
        return Folder(self.dir / name)

    def where(self, name: str) -> str:
        return str(self.dir / name)

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a state without syncing it: a power loss may take a state that the log names.

        Its trial then trains again. The engine syncs a state that takes the place of an older one.
        """
        try:
            try:
                self._write(name, content)
            except FileNotFoundError:
                self.dir.mkdir(parents=True, exist_ok=True)
                self._write(name, content)
        except OSError as error:
            raise StudyError(_unreached(self, error)) from None

    def _write(self, name: str, content: bytes | memoryview) -> None:
        if len(content) <= FEW:  # simulated trials write thousands of small states, so this path is short
            file = os.open(f"{self.dir}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.write(file, content)
            finally:
                os.close(file)
            return
        partial = self.dir / f"{name}.partial"
        with partial.open("wb", buffering=0) as out:
            rest = memoryview(content)
            while rest:
                rest = rest[out.write(rest) :]
        partial.replace(self.dir / name)

    def read(self, name: str) -> BinaryIO:
        return (self.dir / name).open("rb")

    def size(self, name: str) -> int | None:
        try:
            return os.stat(f"{self.dir}/{name}").st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StudyError(_unreached(self, error)) from None

    def names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.dir) if NAME.fullmatch(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StudyError(_unreached(self, error)) from None

    def delete(self, *names: str) -> None:
        try:
            for name in names:
                (self.dir / name).unlink(missing_ok=True)
        except OSError as error:
            raise StudyError(_unreached(self, error)) from None

    def sync(self, name: str) -> None:
        try:
            with self.read(name) as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StudyError(_unreached(self, error)) from None

    def probe(self) -> None:
        there = self.dir.exists()
        super().probe()
        if not there:
            with suppress(OSError):  # the study may still be refused, and then must leave no trace
                self.dir.rmdir()


@dataclass(frozen=True)
class Store(States):
    """States in a place that fsspec reaches."""

    url: str

    def __str__(self) -> str:
        return self.url

    def under(self, name: str) -> States:
        return Store(f"{self.url}/{name}")

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Object stores put a state whole or not at all; elsewhere a state gets its name once it is whole."""
        with self._reached() as (files, dir):
            protocols = files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)
            if not OBJECT_STORES.isdisjoint(protocols):
                files.pipe_file(f"{dir}/{name}", bytes(content))
                return
            partial = f"{dir}/{name}.partial"
            try:
                files.pipe_file(partial, bytes(content))
            except OSError:  # the folder may not exist yet: file systems raise different errors for that
                files.makedirs(dir, exist_ok=True)
                files.pipe_file(partial, bytes(content))
            files.mv(partial, f"{dir}/{name}")

    def read(self, name: str) -> BinaryIO:
        with self._reached() as (files, dir):
            return BytesIO(files.cat_file(f"{dir}/{name}"))

    def size(self, name: str) -> int | None:
        try:
            with self._reached() as (files, dir):
                return int(files.info(f"{dir}/{name}")["size"])
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        try:
            with self._reached() as (files, dir):
                names = [path.rpartition("/")[2] for path in files.ls(dir, detail=False)]
        except FileNotFoundError:
            return []
        return [name for name in names if NAME.fullmatch(name)]

    def delete(self, *names: str) -> None:
        with suppress(FileNotFoundError), self._reached() as (files, dir):
            files.rm([f"{dir}/{name}" for name in names])  # one request, where the place supports that
            return
        for name in names:
            with suppress(FileNotFoundError), self._reached() as (files, dir):
                files.rm(f"{dir}/{name}")

    def sync(self, name: str) -> None:
        """Nothing to do: such a place keeps a state once it is put."""

    @contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """The file system and the folder in it; fsspec makes a new file system in another process or thread."""
        try:
            import fsspec

            files, dir = fsspec.url_to_fs(self.url)
            files.invalidate_cache()  # workers write here too, and fsspec caches listings
            yield files, dir.rstrip("/")
        except Exception as error:
            if getattr(error, "errno", None) == errno.ENOENT or isinstance(error, FileNotFoundError):
                raise FileNotFoundError(str(error)) from None  # some file systems give only the error number
            raise StudyError(_unreached(self, error)) from None


OTHERWISE = "choose another place with states= or --states."


def _unreached(states: States, error: Exception) -> str:
    """One message for each kind of failure, however the file system words it."""
    place, said = f"Cannot reach the states in {states}", " ".join(str(error).split()) or type(error).__name__
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"There is no room for a state in {states} ({said}). Everything before is safe: make room, then resume."
    if isinstance(error, ImportError):
        return f"{place}, which needs a package that is not installed: {said}. Or {OTHERWISE}"
    if isinstance(error, ValueError) and said.startswith("Protocol not known"):
        return f"{place}: expected a protocol that fsspec knows, such as s3 or gs. Or {OTHERWISE}"
    if isinstance(error, FileNotFoundError):
        return f"{place}: there is no such bucket or folder ({said}). Make it, or {OTHERWISE}"
    return (
        f"{place} ({type(error).__name__}: {said}). Expected a place where files can be written, read and deleted: "
        f"check its name and your permissions, or {OTHERWISE}"
    )


def prefix(trial: int, attempt: int) -> str:
    """How the names of the states begin that an attempt at a trial writes; the step and ``.pt`` follow."""
    return f"{trial:06d}-{attempt}-"


def needed(record: TrialRecord, history: History) -> list[StateRef]:
    """A trial's own states that are still needed: to go on from, or for the weights of the best trials.

    A trial that took over a donor's state has its best weights nowhere else, and may be the best if others diverge.
    """
    refs, goes_on = [], record.status in ("waiting", "running", "paused")
    if record.state is not None and goes_on:
        refs.append(record.state)
    alone = goes_on and record.best_unit <= record.copied_at
    if record.best_state is not None and (alone or record in history.kept_or_next):
        refs.append(record.best_state)
    return refs
