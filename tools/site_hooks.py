"""Hooks of mkdocs.yml: files of the repository outside of docs/ that belong to the site, and links to them."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
RECORDS = "benchmarks/results"
SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(?:src|tests|tools|examples|deploy|LICENSE)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, and the benchmark records that pages link to."""
    for uri, name in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    for path in sorted((ROOT / RECORDS).iterdir()):
        files.append(File.generated(config, f"{RECORDS}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site; links to source files become plain text."""
    markdown = SOURCE.sub(r"`\1`", markdown)
    markdown = re.sub(r"\]\((?:\.\./)?" + RECORDS, f"]({RECORDS}", markdown)
    for uri, name in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}", f"]({uri}", markdown)
    if page.file.src_uri in PAGES:
        markdown = markdown.replace("](docs/", "](").replace('src="docs/', 'src="')
    return markdown
