"""Downloads a file of a Python package index without unpacking, building or running any of it.

pip cannot do that for source packages: `pip download` runs their build code to read their metadata, with build tools that no
hash names. So this module uses the index's interface directly, with two requests: the page that lists a project's files, and
the file. The index is the one that pip is configured for.
"""
# SOURCE: the simple repository API of the Python Packaging User Guide, in HTML (PEP 503) and in JSON (PEP 691).

import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from html.parser import HTMLParser

from project import Problem

JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 60
ATTEMPTS = 3


class Links(HTMLParser):
    """The links of a page, by the name of the file."""

    def __init__(self):
        super().__init__()
        self.files = {}

    def handle_starttag(self, tag, attrs):
        link = dict(attrs).get("href")
        if tag == "a" and link:
            path = urllib.parse.urlsplit(link).path
            self.files[urllib.parse.unquote(path.rsplit("/", 1)[-1])] = link


def pip_setting(pip, name):
    """A setting of pip: from its variable or its settings files; None if it is in neither."""
    variable = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if variable:
        return variable
    for section in ("download", "global"):
        found = subprocess.run([str(pip), "config", "get", f"{section}.{name}"], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.strip()
    return None


def index_url(pip):
    """Returns the index from which pip installs packages; pip prints the default in its help."""
    url = pip_setting(pip, "index-url")
    if url is None:
        text = subprocess.run([str(pip), "download", "--help"], stdout=subprocess.PIPE, text=True).stdout
        default = re.search(r"--index-url.*?\(default\s+(\S+?)\)", text, re.S)
        if default is None:
            raise Problem("pip names no package index; set PIP_INDEX_URL")
        url = default.group(1)
    return url.rstrip("/")


def server_of(url):
    """The part of an address that a name and a password are for."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def with_login(url, index):
    """Gives an address of the index's own server the name and the password of the index's address."""
    parts, login = urllib.parse.urlsplit(url), urllib.parse.urlsplit(index).netloc.rpartition("@")[0]
    if not login or parts.username or server_of(url) != server_of(index):
        return url
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc}"))


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects. Another server does not get the password."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if server_of(request.full_url) != server_of(req.full_url):
            request.remove_header("Authorization")
        return request


def opened(url, pip, accept="*/*"):
    """The answer to a request. A name and a password in the address are sent as such."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise Problem(f"the package index answers with an address that is not of the web: {parts.scheme}")
    request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])),
                                     headers={"Accept": accept})
    if parts.username:
        words = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_header("Authorization", "Basic " + b64encode(words.encode()).decode())
    context = ssl.create_default_context(cafile=pip_setting(pip, "cert")) if parts.scheme == "https" else None
    opener = urllib.request.build_opener(Redirects, urllib.request.HTTPSHandler(context=context))
    return opener.open(request, timeout=TIMEOUT_S)


def listed(project, pip):
    """The addresses of a project's files, by name."""
    index = index_url(pip)
    page = f"{index}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    with opened(page, pip, f"{JSON}, text/html;q=0.5") as answer:
        base, text = answer.geturl(), answer.read().decode()
        if answer.headers.get_content_type() == JSON:
            files = {file["filename"]: file["url"] for file in json.loads(text)["files"]}
        else:
            links = Links()
            links.feed(text)
            files = links.files
    return {name: with_login(urllib.parse.urljoin(base, link), index) for name, link in files.items()}


def write_body(answer, out):
    """Writes the whole body of an answer. A connection that is closed early looks like the end of a body."""
    shutil.copyfileobj(answer, out, 1 << 20)
    length = answer.headers.get("Content-Length")
    if length is not None and out.tell() != int(length):
        raise OSError(f"{out.tell()} of {length} bytes came")


def download(project, filename, dest, pip):
    """Writes a file of a project to `dest`; a Problem if that is not possible."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            files = listed(project, pip)
            if filename not in files:
                raise Problem(f"the package index has no {filename} of {project}")
            with opened(files[filename], pip) as answer, open(dest, "wb") as out:
                write_body(answer, out)
            return
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                raise Problem(f"fetching {filename} failed: {error} (is there a network?)") from error
