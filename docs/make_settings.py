"""Write the table of docs/settings.md from the code: `python docs/make_settings.py`. Prose stays as it is."""

from pathlib import Path

from attrs import fields

from zfunc.core.settings import HELP, StepSettings

PAGE = Path(__file__).with_name("settings.md")
BEGIN, END = "<!-- python docs/make_settings.py writes from here -->", "<!-- to here -->"


def with_settings_table(page: str) -> str:
    """The page with a row for each setting of a step, as it is now, between the two marks."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join(["| setting | default | meaning |", "|---|---|---|", *_rows()])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _rows() -> list[str]:
    return [f"| `{f.name}` | `{_default(f.default)}` | {f.metadata[HELP]} |" for f in fields(StepSettings)]


def _default(value: object) -> str:
    return f"{value:_}" if type(value) is int else repr(value).replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(with_settings_table(PAGE.read_text()))
    print(f"written: {PAGE}")
