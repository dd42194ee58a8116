"""Write the tables of docs/deepspeed.md from the code: `python docs/make_deepspeed.py`. Prose stays as it is."""

from pathlib import Path

from zfunc.train.deepspeed.docs_table import with_table

PAGE = Path(__file__).with_name("deepspeed.md")


def main() -> None:
    """Write the page anew, with the tables as the code has them."""
    PAGE.write_text(with_table(PAGE.read_text()))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
