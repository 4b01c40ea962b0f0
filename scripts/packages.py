"""The formats of a release, each written from the folder that dist.py fills: a tarball, a Python wheel, packages for npm and
for Debian. The same folder gives the same bytes: members are sorted, of one time and no owner."""

import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import uuid
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import fetch
from project import LOGS, ROOT, cpu_env, need, run

SOURCES = ROOT / "dist"
NAME = "ggml-rust-npu"
SUMMARY = "The ggml backend for Qualcomm Hexagon and Rockchip NPUs, as a plugin"
PLUGIN = "libggml-rust_npu.so"

# Debian's ggml looks for backends in this folder, and only for fixed names. This is the name of ggml's own backend for Hexagon.
# SOURCE: libggml0 0.27.0-1 of Debian sid, and ggml_backend_load_all_from_path in ggml-backend-reg.cpp.
BACKENDS = "ggml/backends0"
KNOWN_NAME = "libggml-hexagon.so"


class Names(NamedTuple):
    """The packages' names of a processor."""

    wheel: str
    npm: str
    debian: str
    triplet: str


# The targets for which packages are made. A wheel's tag names the oldest glibc; dist.py checks that the files need no newer
# one.
MACHINES = {"x86_64-unknown-linux-gnu": Names("x86_64", "x64", "amd64", "x86_64-linux-gnu"),
            "aarch64-unknown-linux-gnu": Names("aarch64", "arm64", "arm64", "aarch64-linux-gnu")}


class Release(NamedTuple):
    """The filled folder of a target."""

    folder: Path
    target: str
    version: str
    # The time of all files, in seconds since 1970.
    epoch: int
    # The oldest glibc version with which the files work.
    glibc: tuple

    def files(self, name):
        """The files in a folder of the release, sorted."""
        return sorted(path for path in (self.folder / name).rglob("*") if path.is_file())

    def libraries(self):
        """The plugin and the libraries that it loads into the DSP."""
        return [path for path in self.files("lib") if path.suffix == ".so"]


def tarball(folder, out, epoch, top=None):
    """Packs a folder, which is called `top` in the archive, or has its own name."""
    top, content = top or folder.name, io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in [folder, *sorted(folder.rglob("*"))]:
            entry = archive.gettarinfo(path, (Path(top) / path.relative_to(folder)).as_posix())
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.mode = mode(path)
            if path.is_file():
                with open(path, "rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    replace(out, gzipped(content.getvalue()))


def mode(path):
    return 0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644


def gzipped(content):
    """Compressed bytes without a file's name and time, which gzip would put in."""
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, packed, 0) as file:
        file.write(content)
    return packed.getvalue()


def replace(out, content):
    part = out.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, out)


def copy(source, place, executable=False):
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)
    place.chmod(0o755 if executable else 0o644)


def copy_legal(release, licences, sbom):
    """Copies the licences of all that is linked in, and the list of it."""
    copy(release.folder / "LICENSE", licences / "LICENSE")
    for file in release.files("licences"):
        copy(file, licences / file.relative_to(release.folder / "licences"))
    copy(release.folder / "sbom.cdx.json", sbom / "sbom.cdx.json")


def scratch(out):
    """An empty folder to fill before it is packed as `out`."""
    folder = out.parent / "content" / f"{out.name}.d"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def wheel(release, dist):
    """Makes the wheel; returns its path."""
    name = NAME.replace("-", "_")
    tag = f"py3-none-manylinux_{release.glibc[0]}_{release.glibc[1]}_{MACHINES[release.target].wheel}"
    out = dist / f"{name}-{release.version}-{tag}.whl"
    root = scratch(out)
    package, info = root / name, root / f"{name}-{release.version}.dist-info"
    for file in sorted((SOURCES / "python" / name).glob("*.py")):
        copy(file, package / file.name)
    for library in release.libraries():
        copy(library, package / "lib" / library.name)
    copy(release.folder / "bin" / "ggml-npu", package / "bin" / "ggml-npu", executable=True)
    # SOURCE: PEP 639 for licences, PEP 770 for SBOMs.
    copy_legal(release, info / "licenses", info / "sboms")
    licences = [path.relative_to(info / "licenses").as_posix() for path in sorted((info / "licenses").rglob("*"))
                if path.is_file()]
    metadata = ["Metadata-Version: 2.4", f"Name: {NAME}", f"Version: {release.version}", f"Summary: {SUMMARY}",
                "License-Expression: MIT", *(f"License-File: {path}" for path in licences), "Requires-Python: >=3.9",
                "Keywords: ggml,llama.cpp,npu,hexagon,rockchip", "Classifier: Operating System :: POSIX :: Linux",
                "Description-Content-Type: text/markdown", "", (SOURCES / "python" / "README.md").read_text(encoding="utf-8")]
    (info / "METADATA").write_text("\n".join(metadata), encoding="utf-8")
    lines = ["Wheel-Version: 1.0", f"Generator: {NAME} {release.version}", "Root-Is-Purelib: false", f"Tag: {tag}", ""]
    (info / "WHEEL").write_text("\n".join(lines), encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[console_scripts]\nggml-npu = {name}.__main__:tool\n", encoding="utf-8")
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    rows = [f"{path.relative_to(root).as_posix()},sha256={record_sum(path)},{path.stat().st_size}\n" for path in paths]
    (info / "RECORD").write_text("".join(rows) + f"{info.name}/RECORD,,\n", encoding="utf-8")

    moment = datetime.fromtimestamp(release.epoch, UTC).timetuple()[:6]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        # The format recommends that records come last.
        for path in [*paths, info / "RECORD"]:
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix(), moment)
            # A regular file, in Unix notation.
            entry.external_attr, entry.create_system = (0o100000 | mode(path)) << 16, 3
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    replace(out, content.getvalue())
    return out


def record_sum(path):
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def npm(release, dist):
    """Makes the package with JavaScript, which names those of all processors, and that of this one; returns their paths."""
    common = {"version": release.version, "description": SUMMARY, "license": "MIT",
              "keywords": ["ggml", "llama.cpp", "npu", "hexagon", "rockchip"]}
    platforms = {names.npm: f"{NAME}-linux-{names.npm}" for names in MACHINES.values()}

    main = dist / f"{NAME}-{release.version}.tgz"
    folder = scratch(main)
    for name in ("index.js", "index.d.ts", "print.js", "tool.js", "README.md"):
        copy(SOURCES / "npm" / name, folder / name, executable=name in ("print.js", "tool.js"))
    copy(release.folder / "LICENSE", folder / "LICENSE")
    write_json(folder / "package.json", {
        "name": NAME, **common, "type": "module", "exports": {".": {"types": "./index.d.ts", "default": "./index.js"}},
        "types": "./index.d.ts", "bin": {NAME: "print.js", "ggml-npu": "tool.js"}, "engines": {"node": ">=18"},
        "peerDependencies": {"node-llama-cpp": ">=3"}, "peerDependenciesMeta": {"node-llama-cpp": {"optional": True}},
        "optionalDependencies": dict.fromkeys(sorted(platforms.values()), release.version)})
    write_json(folder / "sbom.cdx.json", {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{NAME}/{release.version}/npm/{release.epoch}')}",
        "metadata": {"component": {"type": "library", "bom-ref": NAME, "name": NAME, "version": release.version,
                                   "licenses": [{"expression": "MIT"}]}},
        "components": []})
    tarball(folder, main, release.epoch, "package")

    machine = MACHINES[release.target].npm
    out = dist / f"{platforms[machine]}-{release.version}.tgz"
    folder = scratch(out)
    for library in release.libraries():
        copy(library, folder / "lib" / library.name)
    copy(release.folder / "bin" / "ggml-npu", folder / "bin" / "ggml-npu", executable=True)
    copy_legal(release, folder / "licences", folder)
    copy(release.folder / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(f"# {platforms[machine]}\n\nThe files of the package `{NAME}` for Linux on {machine}.\n",
                                      encoding="utf-8")
    write_json(folder / "package.json", {"name": platforms[machine], **common, "os": ["linux"], "cpu": [machine],
                                         "libc": ["glibc"], "preferUnplugged": True})
    tarball(folder, out, release.epoch, "package")
    return [main, out]


def drop_in(text):
    """The drop-in of board/ for a plugin that ggml finds by its place: without the variables that name one."""
    lines = text[text.index("[Service]"):].splitlines()
    kept = [line for line in lines if not re.match(r"Environment=(GGML_BACKEND_PATH|DSP_LIBRARY_PATH)=", line)]
    return "\n".join(["# Gives the service llama-server of the package llama.cpp-services the NPU. Variables in",
                      "# /etc/default/llama-server override the ones below.", *kept, ""])


def debian(release, dist):
    """Makes the package for Debian; returns its path."""
    names = MACHINES[release.target]
    out = dist / f"{NAME}_{release.version}_{names.debian}.deb"
    root = scratch(out)
    own = root / "usr" / "lib" / names.triplet / NAME
    for library in release.libraries():
        copy(library, own / library.name)
    # The tool looks for the DSP's libraries in its own folder.
    copy(release.folder / "bin" / "ggml-npu", own / "ggml-npu", executable=True)
    program = root / "usr" / "bin" / "ggml-npu"
    program.parent.mkdir(parents=True)
    program.symlink_to(Path("..") / "lib" / names.triplet / NAME / "ggml-npu")
    backend = own.parent / BACKENDS / KNOWN_NAME
    backend.parent.mkdir(parents=True)
    backend.symlink_to(Path("..") / ".." / NAME / PLUGIN)

    rules = (release.folder / "board" / "70-ggml-rust-npu.rules").read_text(encoding="utf-8").replace(
        " Copy to /etc/udev/rules.d, then: udevadm control --reload && udevadm trigger", "")
    unit = (release.folder / "board" / "llama-server.service.d" / "npu.conf").read_text(encoding="utf-8")
    documents = root / "usr" / "share" / "doc" / NAME
    for place, text in {root / "usr" / "lib" / "udev" / "rules.d" / "70-ggml-rust-npu.rules": rules,
                        root / "usr" / "lib" / "systemd" / "system" / "llama-server.service.d" / "50-ggml-rust-npu.conf":
                        drop_in(unit)}.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    copy_legal(release, documents / "licences", documents)
    (documents / "licences" / "LICENSE").rename(documents / "copyright")
    for file in release.files("share"):
        # zsh leaves the folder site-functions to the administrator.
        name = file.relative_to(release.folder / "share").as_posix().replace("site-functions", "vendor-completions")
        place = root / "usr" / "share" / name
        copy(file, place)
        if "man" in place.parts:
            place.with_name(f"{place.name}.gz").write_bytes(gzipped(place.read_bytes()))
            place.unlink()
    changes = (release.folder / "CHANGELOG.md").read_bytes()
    (documents / "changelog.gz").write_bytes(gzipped(changes))

    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    control = root / "DEBIAN"
    for name in ("postinst", "postrm"):
        copy(SOURCES / "debian" / name, control / name, executable=True)
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files]
    (control / "md5sums").write_text("".join(sums), encoding="utf-8")
    fields = {"Package": NAME, "Version": release.version, "Architecture": names.debian,
              "Maintainer": "The ggml-rust-npu authors <maintainers@ggml-rust-npu.invalid>", "Section": "libs",
              "Priority": "optional", "Installed-Size": sum(path.stat().st_size for path in files) // 1024,
              "Depends": f"libc6 (>= {release.glibc[0]}.{release.glibc[1]}), libgcc-s1",
              "Recommends": "libggml0", "Enhances": "llama.cpp-tools, llama.cpp-services, whisper.cpp-tools",
              # Both packages have the same file.
              "Conflicts": "libggml0-backend-hexagon",
              "Description": f"{SUMMARY}\n llama.cpp, whisper.cpp and other programs with Debian's ggml find it by its place."
                             "\n No NPU has run it yet: it was tested in simulation."}
    (control / "control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()), encoding="utf-8")
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(mode(path))
        os.utime(path, (release.epoch, release.epoch), follow_symlinks=False)
    part = out.with_suffix(".part")
    # With more threads the file would be divided into different blocks.
    env = cpu_env(SOURCE_DATE_EPOCH=str(release.epoch), DPKG_DEB_THREADS_MAX="1")
    run([need("dpkg-deb", "install the package dpkg"), "--root-owner-group", "-Zxz", "--build", root, part],
        LOGS / f"dist-{names.debian}.log", env)
    os.replace(part, out)
    return out


def make(release, dist):
    """Makes all packages of a target; returns their paths. None for a target that has no packages."""
    if release.target not in MACHINES:
        return []
    made = [wheel(release, dist), *npm(release, dist), debian(release, dist)]
    for path in made:
        shutil.rmtree(scratch(path))
    return made


def describe(path):
    return f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB  sha256 {fetch.sha256(path)}"
