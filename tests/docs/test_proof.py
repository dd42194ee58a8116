"""docs/proof.md quotes the proof and the code; `make proof` refuses a proof with a gap."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROOF = ROOT / "docs" / "proof" / "verifier.v"
PAGE = (ROOT / "docs" / "proof.md").read_text()
CODE = [(ROOT / "zfunc" / "core" / f"{name}.py").read_text() for name in ("verifier", "plan", "graph")]


def quoted(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_what_the_page_quotes_stands_in_the_proof_and_in_the_code() -> None:
    assert len(quoted("coq")) > 8
    assert len(quoted("py")) > 4
    assert [x for x in quoted("coq") if x not in PROOF.read_text()] == []
    assert [x for x in quoted("py") if not any(x in code for code in CODE)] == []


def test_the_page_states_every_theorem() -> None:
    theorems = re.findall(r"^Theorem .*?\.$", PROOF.read_text(), re.M | re.S)
    assert len(theorems) >= 3
    assert [x for x in theorems if f"{x}\n" not in "".join(quoted("coq"))] == []


# A change of the proof, and what `make proof` says of it; none of what is there.
CHANGES = {
    "none": ("", "", None),
    "a step left out": ("Proof. unfold same. auto. Qed.", "Admitted.", "same_refl"),
    "races accepted": ("direct_conflict g a b -> happens_before p a b\n", "a < b -> True\n", "Error"),
    "writes of other regions": ("| Write c _ => In (fst c) (writes o)", "| Write c _ => True", "Error"),
    "waits not awaited": ("In a (needs p i) -> finished g s a).", "a = i -> finished g s a).", "Error"),
    "an operation not on a lane": ("once : Permutation (concat (lanes p))", "once : incl []", "Error"),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("coqc") is None, reason="no coqc: apt-get install coq")
@pytest.mark.parametrize("change", CHANGES)
def test_a_proof_of_less_is_refused(change: str, tmp_path: Path) -> None:
    old, new, said = CHANGES[change]
    text = PROOF.read_text()
    assert old in text
    proof = tmp_path / PROOF.name
    proof.write_text(text.replace(old, new, 1) if old else text)
    args = ["make", "proof", f"PROOF={proof}", f"PROVED={tmp_path / 'proved'}"]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == (said is None), done
    assert (said or "3 theorems") in done.stdout + done.stderr
