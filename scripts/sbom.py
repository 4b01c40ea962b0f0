"""The list of a release's parts in CycloneDX's JSON, and their licences, from cargo's metadata."""
# SOURCE: the JSON schema of CycloneDX 1.5.

import json
import re
import shutil
import subprocess
import uuid
from datetime import UTC, datetime
from pathlib import Path

from project import ROOT, Problem, toml

LICENCE_FILES = re.compile(r"(LICEN[CS]E|COPYING|COPYRIGHT|UNLICENSE|NOTICE)", re.I)

# The libraries for the DSP have their own workspace, because no other crate is built for it.
DSP = ROOT / "hexagon-ops" / "skel"
DSP_TARGET = "hexagon-unknown-none-elf"


def linked(folder, target, roots):
    """The packages that are linked into those called `roots`: {id: package}, and {id: ids of its dependencies}.

    Macros and build scripts run where the release is made, and are not part of it.
    """
    done = subprocess.run(["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target], cwd=folder,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Problem(f"cargo metadata failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    metadata = json.loads(done.stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    found, needs = {}, {}
    todo = [package for package, entry in packages.items() if entry["name"] in roots]
    while todo:
        package = todo.pop()
        if package in found:
            continue
        found[package] = packages[package]
        needs[package] = [each["pkg"] for each in nodes[package]["deps"]
                          if any(kind["kind"] is None for kind in each["dep_kinds"]) and not is_macro(packages[each["pkg"]])]
        todo += needs[package]
    return found, needs


def is_macro(package):
    return any("proc-macro" in target["kind"] for target in package["targets"])


def checksums(folder):
    """The sha256 of each package of a lock file, by name and version."""
    lock = toml(folder / "Cargo.lock")
    return {(each["name"], each["version"]): each["checksum"] for each in lock["package"] if "checksum" in each}


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, sums):
    # CycloneDX expects an SPDX expression, but older crates write OR as a slash.
    entry = {"type": "library", "bom-ref": reference(package), "name": package["name"], "version": package["version"],
             "purl": reference(package), "licenses": [{"expression": package["license"].replace("/", " OR ")}]}
    if package["description"]:
        entry["description"] = " ".join(package["description"].split())
    digest = sums.get((package["name"], package["version"]))
    if digest:
        entry["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return entry


def compiler():
    """The version of rustc, whose standard library is linked in, and the folder with its licences."""
    def rustc(*args):
        return subprocess.run(["rustc", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    release = re.search(r"^release: (\S+)", rustc("-vV"), re.M).group(1)
    return release, Path(rustc("--print", "sysroot").strip()) / "share" / "doc" / "rust"


def write(folder, target, roots, version, epoch):
    """Writes `sbom.cdx.json` and `licences/` into the folder of a release."""
    found, needs = linked(ROOT, target, roots)
    more, more_needs = linked(DSP, DSP_TARGET, ["ggml-rust-npu-skel"])
    sums = checksums(ROOT) | checksums(DSP)
    # The same packages have different ids in the two workspaces.
    packages = {reference(package): package for package in [*found.values(), *more.values()]}
    edges = {name: set() for name in packages}
    for known, edge in ((found, needs), (more, more_needs)):
        for package, others in edge.items():
            edges[reference(known[package])].update(reference(known[other]) for other in others)

    release, documents = compiler()
    std = {"type": "library", "bom-ref": f"rust-std@{release}", "name": "rust-std", "version": release,
           "description": "the standard library of Rust", "licenses": [{"expression": "MIT OR Apache-2.0"}]}
    main = {"type": "application", "bom-ref": "ggml-rust-npu-release", "name": "ggml-rust-npu", "version": version,
            "licenses": [{"expression": "MIT"}]}
    own = sorted(name for name, package in packages.items() if package["name"] in [*roots, "ggml-rust-npu-skel"])
    document = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        # Derived from the contents, so that two builds get the same number.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'ggml-rust-npu/{version}/{target}/{epoch}')}",
        "metadata": {"timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "component": main,
                     "properties": [{"name": "target", "value": target}]},
        "components": [component(packages[name], sums) for name in sorted(packages)] + [std],
        "dependencies": [{"ref": main["bom-ref"], "dependsOn": [*own, std["bom-ref"]]}]
        + [{"ref": name, "dependsOn": sorted(edges[name])} for name in sorted(packages)] + [{"ref": std["bom-ref"]}],
    }
    (folder / "sbom.cdx.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    licences(folder / "licences", packages, documents)


def licences(folder, packages, rust):
    """Copies the licence files of all packages of others, and of the standard library."""
    for name in sorted(packages):
        package = packages[name]
        if package["source"] is None:
            continue
        source = Path(package["manifest_path"]).parent
        files = [file for file in sorted(source.iterdir()) if file.is_file() and LICENCE_FILES.match(file.name)]
        if not files:
            raise Problem(f"{package['name']} {package['version']} ships no licence file; its licence is {package['license']}")
        place = folder / f"{package['name']}-{package['version']}"
        place.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, place / file.name)
    if not (rust / "COPYRIGHT-library.html").is_file():
        raise Problem(f"the Rust toolchain has no {rust / 'COPYRIGHT-library.html'}, the licences of its standard library")
    place = folder / "rust-std"
    place.mkdir(parents=True)
    shutil.copyfile(rust / "COPYRIGHT-library.html", place / "COPYRIGHT-library.html")
