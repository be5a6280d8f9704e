"""README and docs say what the code does: examples run, the configuration page is current, links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.helpers.assets import load_tokenizer
from tests.helpers.reference_model import save_random_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "examples/data/README.md"])


def test_configuration_page_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("generate_config", ROOT / "docs/generate_config.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    message = "run: python docs/generate_config.py"
    assert (ROOT / "docs/config.md").read_text() == script.render(), message


def test_links_lead_to_files():
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert links
    missing = [(page.name, link) for page, link in links if not (page.parent / link).exists()]
    assert not missing


def test_readme_example_trains(tmp_path, monkeypatch):
    """The README's Python runs as it stands, with a tiny model in the place of the hub's."""
    save_random_model("qwen3", tmp_path / "model")
    load_tokenizer().save_pretrained(tmp_path / "model")
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    named = 'model = "Qwen/Qwen3-0.6B"'
    assert block.count(named) == 1
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(block.replace(named, f"model = {str(tmp_path / 'model')!r}"), "README.md", "exec"), {})
    assert (tmp_path / "outputs/agent/adapter_model.safetensors").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_in_the_docs_is_python(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec")
