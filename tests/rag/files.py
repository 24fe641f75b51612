"""Files that tests parse: small PDFs and DOCX files, made by hand."""

import io
import zipfile
from pathlib import Path


def pdf(pages: list[str], extra: bytes = b"") -> bytes:
    """A PDF of text pages; `extra` is added to the trailer, as an /Encrypt entry is."""
    objects: list[bytes] = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    numbers = []
    for page in pages:
        lines = " ".join(f"({line}) Tj T*" for line in page.split("\n"))
        stream = f"BT /F1 10 Tf 12 TL 40 780 Td {lines} ET".encode("latin-1")
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        fonts = b"<< /Font << /F1 3 0 R >> >>"
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents %d 0 R /Resources %s >>"
            % (len(objects), fonts)
        )
        numbers.append(len(objects))
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(numbers))
    body, places = io.BytesIO(), []
    body.write(b"%PDF-1.4\n")
    for number, content in enumerate(objects, 1):
        places.append(body.tell())
        body.write(b"%d 0 obj\n%s\nendobj\n" % (number, content))
    start = body.tell()
    body.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    body.write(b"".join(b"%010d 00000 n \n" % place for place in places))
    body.write(b"trailer\n<< /Size %d /Root 1 0 R %s >>\n" % (len(objects) + 1, extra))
    body.write(b"startxref\n%d\n%%%%EOF\n" % start)
    return body.getvalue()


def docx(paragraphs: list[str]) -> bytes:
    inner = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    return docx_of(
        '<?xml version="1.0"?><w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        f"<w:body>{inner}</w:body></w:document>".encode()
    )


def docx_of(content: bytes) -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", content)
    return body.getvalue()


def zip_bomb(path: Path, megabytes: int) -> None:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("word/document.xml", "w") as entry,
    ):
        for _ in range(megabytes):
            entry.write(b"<a>" + b" " * ((1 << 20) - 3))
