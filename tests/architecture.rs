//! Proves that modules only use what is below them on the import ladder of `src/lib.rs`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::BTreeMap;
use std::path::Path;

/// Modules from the bottom up; a module may use those of its own step and of the steps below.
const LADDER: [&[&str]; 8] = [
    &["error", "tensor", "caps", "files", "gguf"],
    &["rules", "config"],
    &[
        "shm",
        "graph",
        "repack",
        "reference",
        "packfile",
        "dequantize",
    ],
    &["ring", "plan", "vendor"],
    &["device"],
    &["selftest", "backend"],
    &["abi"],
    &["bin"],
];

/// What a module may not use although it is below: devices execute, they know no graph and no plan, and the other way
/// round.
const APART: [(&str, &[&str]); 2] = [
    ("device", &["graph", "plan"]),
    ("plan", &["device", "vendor"]),
];

fn sources(folder: &Path, module: &str, found: &mut BTreeMap<String, Vec<String>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let module = if module.is_empty() { &stem } else { module };
        if path.is_dir() {
            sources(&path, module, found);
        } else if stem != "lib" {
            let text = std::fs::read_to_string(&path).unwrap();
            found.entry(module.to_owned()).or_default().push(text);
        }
    }
}

#[test]
fn modules_use_only_what_is_below_them() {
    let mut found = BTreeMap::new();
    sources(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        "",
        &mut found,
    );
    let step = |module: &str| LADDER.iter().position(|step| step.contains(&module));
    for (module, texts) in found {
        let own = step(&module).unwrap_or_else(|| panic!("{module} is not on the ladder"));
        let apart = APART
            .iter()
            .find(|(name, _)| *name == module)
            .map_or(&[][..], |(_, list)| list);
        for text in texts {
            // Unit tests may look further.
            let code = text.split("#[cfg(test)]").next().unwrap();
            for used in code.split("crate::").skip(1) {
                let used = used
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .next()
                    .unwrap();
                let Some(other) = step(used) else { continue };
                assert!(other <= own, "{module} uses {used}, which is above it");
                assert!(!apart.contains(&used), "{module} must not use {used}");
            }
        }
    }
}
