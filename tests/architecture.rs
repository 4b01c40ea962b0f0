//! Proves that modules only use modules below them on the import ladder of `src/lib.rs`, and that
//! both families of NPUs have one shape and know nothing of each other.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Modules from the bottom up; a module may use those of the same step and of the steps below. The
/// parts of a family and of `backend` have separate steps.
const LADDER: [&[&str]; 10] = [
    &["error", "ggml_version", "tensor", "files", "gguf", "loss"],
    &["hexagon::caps", "rockchip::caps"],
    &[
        "beside",
        "config",
        "host_memory",
        "dequantize",
        "driver",
        "reference",
    ],
    &["graph", "packfile", "timeline"],
    &["backend"],
    &[
        "hexagon::layout",
        "hexagon::driver",
        "rockchip::layout",
        "rockchip::driver",
    ],
    &[
        "hexagon::pack",
        "rockchip::pack",
        "hexagon::plan",
        "rockchip::plan",
    ],
    &["hexagon::device", "rockchip::device"],
    &["hexagon", "rockchip"],
    &["backend::find", "backend::offline", "abi", "register"],
];

/// Modules that must not use each other although the ladder allows it: devices and plans.
const APART: [(&str, &[&str]); 4] = [
    ("hexagon::device", &["hexagon::plan", "graph"]),
    ("rockchip::device", &["rockchip::plan", "graph"]),
    ("hexagon::plan", &["hexagon::driver"]),
    ("rockchip::plan", &["rockchip::driver"]),
];

const FAMILIES: [&str; 2] = ["hexagon", "rockchip"];

/// The files of a family; a file may have a folder of the same name.
const FAMILY_FILES: [&str; 11] = [
    "buffer",
    "caps",
    "device",
    "discovery",
    "driver",
    "layout",
    "mod",
    "pack",
    "plan",
    "selftest",
    "stream",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Every source file below a folder, with its module path from the crate's root.
fn sources(folder: &Path, path: &[String], found: &mut Vec<(Vec<String>, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        let stem = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let mut module = path.to_vec();
        if stem != "mod" && stem != "lib" {
            module.push(stem);
        }
        if file.is_dir() {
            sources(&file, &module, found);
        } else if file.extension().is_some_and(|ext| ext == "rs") {
            found.push((module, std::fs::read_to_string(&file).unwrap()));
        }
    }
}

/// The crate's modules with their code, unit tests left out: these may look further.
fn modules() -> Vec<(Vec<String>, String)> {
    let mut found = Vec::new();
    sources(&root(), &[], &mut found);
    let is_test = |module: &[String]| module.last().is_some_and(|name| name == "tests");
    found.retain(|(module, _)| !module.is_empty() && !is_test(module));
    for (_, text) in &mut found {
        let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
        let lines = code.lines().map(|line| line.split("//").next().unwrap());
        *text = lines.collect::<Vec<_>>().join("\n");
    }
    found
}

/// Splits at the commas that are not inside of braces.
fn split(list: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, char) in list.char_indices() {
        match char {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts
}

/// Adds the paths of a path with braces: `a::{b, c::{self, d}}` is `a::b`, `a::c` and `a::c::d`.
fn expand(prefix: &[&str], tree: &str, found: &mut BTreeSet<Vec<String>>) {
    let tree = tree.trim();
    let (path, group) = match tree.split_once('{') {
        Some((path, group)) => (path, Some(group.strip_suffix('}').unwrap_or(group))),
        None => (tree.split_whitespace().next().unwrap_or(""), None),
    };
    let names = path.split("::").map(str::trim);
    let names = names.filter(|name| !name.is_empty() && *name != "self");
    let path: Vec<&str> = prefix.iter().copied().chain(names).collect();
    match group {
        Some(group) => (split(group).iter()).for_each(|part| expand(&path, part, found)),
        None => {
            found.insert(path.iter().map(|name| (*name).to_owned()).collect());
        }
    }
}

/// The text of a path that begins here, up to the brace that closes it.
fn path_text(code: &str) -> &str {
    let mut depth = 0;
    for (at, char) in code.char_indices() {
        match char {
            '{' if at == 0 || depth > 0 || code[..at].ends_with("::") => depth += 1,
            '}' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    return &code[..=at];
                }
            }
            char if depth == 0 && !char.is_alphanumeric() && char != '_' && char != ':' => {
                return &code[..at];
            }
            _ => {}
        }
    }
    code
}

/// Returns the modules of the crate that code uses, as paths from its root: those after `crate::`,
/// and after `super::`.
fn uses(module: &[String], code: &str) -> BTreeSet<Vec<String>> {
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        expand(&[], path_text(&code[at + "crate::".len()..]), &mut found);
    }
    for (at, _) in code.match_indices("super::") {
        if code[..at].ends_with("super::") {
            continue;
        }
        let mut rest = &code[at..];
        let mut up = 0;
        while let Some(below) = rest.strip_prefix("super::") {
            (rest, up) = (below, up + 1);
        }
        let Some(kept) = module.len().checked_sub(up) else {
            continue;
        };
        let prefix: Vec<&str> = module[..kept].iter().map(String::as_str).collect();
        expand(&prefix, path_text(rest), &mut found);
    }
    found
}

/// The row of the ladder for a path: that of its first two names or, if there is none, that of its
/// first name.
fn step(path: &[String]) -> Option<(usize, String)> {
    let row = |name: &str| LADDER.iter().position(|row| row.contains(&name));
    let two = path.get(..2).map(|two| two.join("::"));
    let of_two = two.and_then(|name| Some((row(&name)?, name)));
    of_two.or_else(|| {
        let one = path.first()?;
        Some((row(one)?, one.clone()))
    })
}

#[test]
fn modules_use_only_what_is_below_them() {
    let mut seen = BTreeMap::new();
    for (module, code) in modules() {
        let (own, name) =
            step(&module).unwrap_or_else(|| panic!("{module:?} is not on the ladder"));
        *seen.entry(name.clone()).or_insert(0) += 1;
        let apart = APART.iter().filter(|(from, _)| *from == name);
        let apart: Vec<&str> = apart.flat_map(|(_, list)| list.iter().copied()).collect();
        for path in uses(&module, &code) {
            let Some((other, used)) = step(&path) else {
                continue;
            };
            assert!(
                other <= own,
                "{} uses {used}, which is above it",
                module.join("::")
            );
            assert!(
                !apart.contains(&used.as_str()),
                "{} uses {used}",
                module.join("::")
            );
        }
    }
    for name in LADDER.into_iter().flatten() {
        assert!(seen.contains_key(*name), "the ladder has no use for {name}");
    }
}

/// `config` names the chips of both, and so does a pack file; these are tables that anything may
/// read.
#[test]
fn families_know_nothing_of_each_other() {
    for (module, code) in modules() {
        for path in uses(&module, &code) {
            let Some(family) = path
                .first()
                .filter(|name| FAMILIES.contains(&name.as_str()))
            else {
                continue;
            };
            let is_table = path.get(1).is_some_and(|part| part == "caps");
            let allowed = match module[0].as_str() {
                own if FAMILIES.contains(&own) => own == family,
                "abi" | "backend" => true,
                "config" | "packfile" => is_table,
                _ => false,
            };
            assert!(allowed, "{} uses {}", module.join("::"), path.join("::"));
        }
    }
}

#[test]
fn both_families_have_the_same_files() {
    for family in FAMILIES {
        let (mut files, mut folders) = (BTreeSet::new(), BTreeSet::new());
        for entry in std::fs::read_dir(root().join(family)).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let kind = if path.is_dir() {
                &mut folders
            } else {
                &mut files
            };
            kind.insert(stem);
        }
        assert!(
            files.iter().eq(FAMILY_FILES.iter()),
            "src/{family} has {files:?}"
        );
        assert!(folders.is_subset(&files), "src/{family} has {folders:?}");
    }
}

/// The tests above depend on this.
#[test]
fn imports_in_braces_are_seen() {
    let code = "use crate::{error::Error, hexagon::{self, caps::{HexCaps}}};\nlet x = super::super::plan::Refusal;";
    let module = ["rockchip", "device", "core"].map(String::from);
    let found: Vec<String> = uses(&module, code)
        .iter()
        .map(|path| path.join("::"))
        .collect();
    let want = [
        "error::Error",
        "hexagon",
        "hexagon::caps::HexCaps",
        "rockchip::plan::Refusal",
    ];
    assert_eq!(found, want);
}

/// Returns the names of the tables of dependencies of a Cargo.toml, as Rust writes them.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let (mut is_table, mut found) = (false, BTreeSet::new());
    for line in manifest.lines() {
        if line.starts_with('[') {
            is_table = line.ends_with("dependencies]") && line != "[workspace.dependencies]";
        } else if let (true, Some((name, _))) = (is_table, line.split_once(['.', ' ', '='])) {
            found.insert(name.replace('-', "_"));
        }
    }
    found.retain(|name| !name.starts_with('#') && !name.is_empty());
    found
}

/// Regression: rknpu-ops depended on rayon for months after its last use.
#[test]
fn every_dependency_is_used() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut n_seen = 0;
    let crates = [
        ".",
        "hexagon-ops",
        "os",
        "plugin",
        "rknpu-matmul",
        "rknpu-ops",
        "scale",
        "sim-common",
        "task-pool",
        "test-kit",
        "tool",
    ];
    for name in crates {
        let folder = workspace.join(name);
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let mut files = Vec::new();
        for part in ["src", "tests", "benches"] {
            if folder.join(part).is_dir() {
                sources(&folder.join(part), &[], &mut files);
            }
        }
        let mut code: Vec<String> = files.into_iter().map(|(_, code)| code).collect();
        if let Ok(build) = std::fs::read_to_string(folder.join("build.rs")) {
            // Both build scripts include this file.
            let shared = workspace.join("ggml-glue/compile.rs");
            code.extend([build, std::fs::read_to_string(shared).unwrap()]);
        }
        for dependency in dependencies(&manifest) {
            n_seen += 1;
            let is_used = (code.iter()).any(|code| code.contains(&format!("{dependency}::")));
            assert!(is_used, "{name} does not use {dependency}");
        }
    }
    assert!(n_seen > 30, "{n_seen} dependencies are read");
}
