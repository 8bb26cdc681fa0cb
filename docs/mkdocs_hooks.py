"""Hooks of the documentation: version, cards, links, and examples of docstrings."""

import html
import json
import os
import posixpath
import re
import tomllib
from pathlib import Path

from griffe import Extension
from mkdocs.structure.files import File

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
CARD = "images/social.png"
LINKED_FILE = re.compile(r"(?<=\]\()(?![a-z]+:)[^)\s#]+")


def on_config(config, **_):
    """Take the version, and the repository if there is one, from `pyproject.toml`."""
    project = PROJECT["project"]
    config.copyright = f"meshpar {project['version']}"
    config.repo_url = project.get("urls", {}).get("Repository")
    return config


def on_post_page(output, *, page, config, **_):
    """Add what a link to the page shows elsewhere: title, description, picture."""
    depth = "../" * page.url.count("/")
    card = {
        "title": page.title,
        "description": config.site_description,
        "image": (config.site_url or depth) + CARD,
    }
    tags = [
        f'<meta property="og:{key}" content="{html.escape(str(text))}">'
        for key, text in card.items()
    ]
    return output.replace("</head>", "\n".join([*tags, "</head>"]), 1)


def on_files(files, *, config):
    """A notebook is a page too, with the outputs that are stored in it."""
    for file in list(files.media_files()):
        if file.src_uri.endswith(".ipynb"):
            content = notebook_page(Path(file.abs_src_path))
            name = file.src_uri.replace(".ipynb", ".md")
            files.append(File.generated(config, name, content=content))
    return files


def notebook_page(path):
    """Markdown of a notebook: texts, code, and outputs as HTML or as text."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if code else source)
        parts += map(output_text, cell.get("outputs", []))
    return "\n\n".join([*parts, f"[This notebook]({path.name})", ""])


def output_text(output):
    """Markdown of an output."""
    data = output.get("data", {})
    if "text/html" in data:
        return f"<div>\n{''.join(data['text/html']).strip()}\n</div>"
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```"


def on_page_markdown(markdown, *, page, files, **_):
    """Turn links to files of the repository into links to pages of the site.

    A page may be a symbolic link to a file outside `docs/`. Its links start at that
    file, and links to the page name that file, so that they work in the repository too.
    A link to a file that is not on the site stays as it is, and MkDocs warns of it.
    """
    if page.file.abs_src_path is None:  # made from a notebook, which has no links
        return markdown
    all_files = [*files.documentation_pages(), *files.media_files()]
    all_files = [file for file in all_files if file.abs_src_path is not None]
    real = {os.path.realpath(file.abs_src_path): file for file in all_files}
    path = Path(page.file.abs_src_path)

    def on_site(link):
        target = os.path.realpath(path.resolve().parent / link[0])
        if target in real:
            return posixpath.relpath(
                real[target].src_uri, posixpath.dirname(page.file.src_uri)
            )
        return os.path.relpath(target, path.parent) if path.is_symlink() else link[0]

    return LINKED_FILE.sub(on_site, markdown)


class Examples(Extension):
    """Read `Example:` of a docstring as code; Griffe reads only `Examples:`."""

    def on_object(self, *, obj, **_):
        """Rename the section; lines keep their numbers."""
        if obj.docstring:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", value)
