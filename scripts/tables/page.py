"""A page of docs/results/tables: the experiment, its command, its limits, and its tables."""

import datetime
from typing import NamedTuple

from project import ROOT

FOLDER = ROOT / "docs" / "results" / "tables"


class Table(NamedTuple):
    """Text above a table, its columns and its rows. Cells are text."""

    text: str
    columns: list
    rows: list

    def markdown(self):
        head, *rows = (f"| {' | '.join(line)} |" for line in (self.columns, *self.rows))
        return "\n".join([head, "|---" * len(self.columns) + "|", *rows])


class Page(NamedTuple):
    """A page. `limits` are whole sentences about the limits of its numbers."""

    title: str
    text: str
    limits: str
    tables: list
    date: datetime.date = None

    def markdown(self, name):
        parts = [f"# {self.title}", self.text]
        made = f"`make results TABLE={name}`"
        parts.append(f"{made}, {self.date.isoformat()}." if self.date else f"{made} writes this page from counts in the tree.")
        parts.append(self.limits)
        for table in self.tables:
            parts += [table.text, table.markdown()]
        return "\n\n".join(wrapped(part) for part in parts if part) + "\n"


def wrapped(part, width=100):
    """A paragraph in lines of at most `width` characters; headings, tables and code are unchanged."""
    if part.startswith(("#", "|", "```", "- ")) and "\n\n" not in part:
        return part
    paragraphs = []
    for paragraph in part.split("\n\n"):
        if paragraph.startswith(("#", "|", "```", "- ")):
            paragraphs.append(paragraph)
            continue
        lines, line = [], ""
        for word in paragraph.split():
            if line and len(line) + 1 + len(word) > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}".strip()
        paragraphs.append("\n".join([*lines, line]))
    return "\n\n".join(paragraphs)


def path(name):
    return FOLDER / f"{name}.md"


def number(value, digits=1):
    return f"{value:,.{digits}f}"
