"""What `.mkdocs.yml` cannot say: how links and examples of docstrings are read."""

import os
import posixpath
import re
from pathlib import Path

from griffe import Extension

LINKED_FILE = re.compile(r"(?<=\]\()(?![a-z]+:)[^)\s#]+")


def on_page_markdown(markdown, *, page, files, **_):
    """Links lead to files of the repository: here they become those of the site.

    A page may be a symbolic link to a file outside `docs/`. Its links start where that
    file is, and links to it name that file, as a reader of the repository follows them.
    What the site does not have stays a path that MkDocs warns of.
    """
    all_files = [*files.documentation_pages(), *files.media_files()]
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
    """Reads a docstring's `Example:` as code, as Griffe reads `Examples:` alone."""

    def on_object(self, *, obj, **_):
        """Renames the section; lines keep their numbers."""
        if obj.docstring:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", value)
