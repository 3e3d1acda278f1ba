"""What the README shows runs as it stands."""

from __future__ import annotations

import re


def test_the_example_runs(run_python, root_dir, backend_name):
    code = re.search(r"```python\n(.*?)```", (root_dir / "README.md").read_text(), re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 17, "the example is meant to stay short"
    done = run_python(code, backend=backend_name)
    assert done.stdout == "RESTORED(1) 1\nb'hello'\n", done.stderr


def test_links_lead_somewhere(root_dir):
    for target in re.findall(r"\]\(([\w./-]+)\)", (root_dir / "README.md").read_text()):
        assert (root_dir / target).exists(), target
