"""Assembly of HTML, CSS and JavaScript modules, and the Content-Security-Policy."""

import re

import pytest

from headlens.assemble import assemble_html, join_modules


def written(folder, **modules):
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return folder / "main.js"


def test_modules_are_joined_once_and_after_their_imports(tmp_path):
    both = 'import {\n  one,\n  two,\n} from "./two.js";\n'
    text = join_modules(
        written(
            tmp_path,
            main=f'{both}import {{ one }} from "./one.js";\nstart(one, two);\n',
            two='import { one } from "./one.js";\nexport const two = one + 1;\n',
            one="export let one = 1;\nexport async function more() {}\n",
        )
    )
    places = [text.index(code) for code in ("let one", "async function", "const two", "start(")]
    assert places == sorted(places)
    assert text.count("let one") == 1
    assert not {"import", "export"} & set(text.split())


@pytest.mark.parametrize(
    "main",
    [
        'import { one } from "./one.js";\n',  # and one.js imports main.js
        'import * as all from "./two.js";\n',
        "export default 1;\n",
    ],
)
def test_modules_that_cannot_be_joined_are_refused(tmp_path, main):
    folder = written(tmp_path, main=main, one='import { x } from "./main.js";\n', two="")
    with pytest.raises(ValueError):  # noqa: PT011
        join_modules(folder)


def test_comments_on_their_own_lines_and_indentation_are_removed(tmp_path):
    style = "/* a\n b */\np {\n  color: red; /* c */\n}\n"
    code = "/* a\n b */\n  // c\n  /** d */\n  start('/* e */ // f');  // g\n\n\n  end();\n"
    (tmp_path / "style.css").write_text(style)
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="style.css">\n<script type="module" src="main.js"></script>'
    )
    written(tmp_path, main=code)
    html = re.sub(r"\n+", "\n", assemble_html(tmp_path / "index.html", {}))
    kept = "start('/* e */ // f');  // g\nend();"
    style = "<style>\np {\ncolor: red;\n}\n</style>"
    assert html == f'{style}\n<script type="module">\n{kept}\n</script>'
