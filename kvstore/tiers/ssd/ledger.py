"""The ledger: what each file of the directory takes on disk, as ``du`` counts it. The core's lock guards it."""

from __future__ import annotations


class Ledger:
    """Allocated bytes by name; directories are entries too, since ``du`` counts them."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._total = 0
        self._segments = 0
        self.segment_bytes: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        """All files and directories."""
        return self._total + self._segments

    @property
    def metadata_bytes(self) -> int:
        """All but segments."""
        return self._total

    @property
    def segments_bytes(self) -> int:
        """Segments only."""
        return self._segments

    def file_bytes(self, name: str) -> int:
        """Size of a file that is no segment; 0 if there is none."""
        return self._files.get(name, 0)

    def set_file(self, name: str, allocated: int) -> None:
        """A file or directory other than a segment has this size."""
        self._total += allocated - self._files.get(name, 0)
        self._files[name] = allocated

    def remove_file(self, name: str) -> None:
        """A file is gone."""
        self._total -= self._files.pop(name, 0)

    def set_segment(self, number: int, allocated: int) -> None:
        """A segment has this size."""
        self._segments += allocated - self.segment_bytes.get(number, 0)
        self.segment_bytes[number] = allocated

    def remove_segment(self, number: int) -> None:
        """A segment is gone."""
        self._segments -= self.segment_bytes.pop(number, 0)

    def names(self) -> list[str]:
        """Names of all entries that are no segments."""
        return list(self._files)
