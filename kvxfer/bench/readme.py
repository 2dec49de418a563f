"""`kvxfer bench readme`: README.md's performance section, from the figures that are kept."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from kvxfer.errors import UsageError

if TYPE_CHECKING:
    from kvxfer.bench.results import Result

BEGIN = "<!-- figures: written by `kvxfer bench readme`, do not edit -->"
END = "<!-- end of figures -->"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmeOptions:
    """What `kvxfer bench readme` may be told."""

    check: bool = False
    """Change nothing: print what would be changed, and exit with 1 if that is anything."""
    readme: Path = Path("README.md")
    """The file with the section, between its two markers."""
    results: Path = Path("tests/bench/results")
    """The directory of the figures."""


def run_readme(options: ReadmeOptions) -> int:
    """Raises UsageError for files that are missing, are not what they should be, or lack what the
    section shows; the README is then as it was."""
    try:
        old = options.readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("readme", str(options.readme), f"cannot be read: {error}") from None
    new = with_section(old, options.results, str(options.readme))
    if new == old:
        print(f"{options.readme} says what the figures say")
        return 0
    if options.check:
        name = str(options.readme)
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), name, "from the figures", lineterm=""
        )
        print("\n".join(lines))
        return 1
    draft = options.readme.with_name(f".{options.readme.name}.draft")
    draft.write_text(new, encoding="utf-8")
    draft.replace(options.readme)
    print(f"wrote the figures to {options.readme}")
    return 0


def with_section(text: str, results: Path, name: str = "README.md") -> str:
    """`text` with the section anew between the markers."""
    from kvxfer.bench.readme_tables import section_of

    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise UsageError("readme", name, f"needs one line {BEGIN!r}, and after it one {END!r}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section_of(read_all(results))}\n\n{END}{after}"


def read_all(directory: Path) -> dict[str, list[Result]]:
    """By name, all files but whole reports of `kvxfer bench connectors`, which hold no figures."""
    from kvxfer.bench.connectors.report import is_report
    from kvxfer.bench.results import read_results

    paths = [path for path in sorted(directory.glob("*.json")) if not is_report(path)]
    if not paths:
        raise UsageError("results", str(directory), "holds no *.json")
    return {path.stem: read_results(path) for path in paths}
