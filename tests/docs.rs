//! Proves that the documentation holds together: links lead somewhere, pages are reachable, the README stays short.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines that a person reads before anything else.
const README_LINES: usize = 100;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the files of the project relative to the root: all but the builds' and git's own.
fn files() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap();
            if !path.is_dir() {
                found.insert(path.strip_prefix(root()).unwrap().to_path_buf());
            } else if !["target", ".git", "__pycache__"]
                .iter()
                .any(|skipped| name == *skipped)
            {
                folders.push(path);
            }
        }
    }
    found
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(root().join(file))
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Returns the Markdown files and their texts.
fn pages() -> BTreeMap<PathBuf, String> {
    let markdown = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "md");
    files()
        .into_iter()
        .filter(markdown)
        .map(|file| (file.clone(), read(&file)))
        .collect()
}

/// Returns the text without fenced code, line by line.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// Returns the targets of a page's links and pictures that stay in the repository.
fn links(text: &str) -> Vec<String> {
    let targets = prose(text).flat_map(|line| {
        let rest = line.split("](").skip(1);
        rest.filter_map(|rest| rest.split_once(')').map(|(target, _)| target.to_owned()))
    });
    targets.filter(|target| !target.contains("://")).collect()
}

/// Returns the anchors that GitHub makes of a page's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = words
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Resolves a link of `page` to a path below the root.
fn resolve(page: &Path, target: &str) -> PathBuf {
    let mut path = page.parent().unwrap().to_path_buf();
    for part in Path::new(target).components() {
        match part {
            std::path::Component::ParentDir => {
                assert!(path.pop(), "{target} leaves the repository")
            }
            std::path::Component::CurDir => {}
            other => path.push(other),
        }
    }
    path
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let pages = pages();
    let mut wrong = Vec::new();
    for (page, text) in &pages {
        for link in links(text) {
            let (target, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let path = if target.is_empty() {
                page.clone()
            } else {
                resolve(page, target)
            };
            let there = root().join(&path).exists();
            let heading = anchor.is_empty()
                || pages
                    .get(&path)
                    .is_some_and(|text| anchors(text).contains(anchor));
            if !there || !heading {
                wrong.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "links that lead nowhere:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn every_page_is_reachable_from_the_readme() {
    let pages = pages();
    let mut reached = BTreeSet::new();
    let mut next = vec![PathBuf::from("README.md")];
    while let Some(page) = next.pop() {
        if !reached.insert(page.clone()) {
            continue;
        }
        let Some(text) = pages.get(&page) else {
            continue;
        };
        let targets = links(text)
            .into_iter()
            .map(|link| link.split('#').next().unwrap().to_owned());
        next.extend(
            targets
                .filter(|target| !target.is_empty())
                .map(|target| resolve(&page, &target)),
        );
    }
    let lost: Vec<_> = files()
        .into_iter()
        .filter(|file| file.starts_with("docs") && !reached.contains(file))
        .filter(|file| file.extension().is_none_or(|extension| extension != "txt"))
        .collect();
    assert!(lost.is_empty(), "no link leads to {lost:?}");
}

#[test]
fn the_readme_is_short_and_ends_its_quick_start_in_llama_cli() {
    let text = read(Path::new("README.md"));
    let lines = text.lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines");
    let start = text.split("## Quick start").nth(1).unwrap();
    assert!(start.contains("llama-cli") && start.contains("-ngl 99 -p"));
}

/// Charts, and tables of counts, are written by a script from what was measured.
#[test]
fn charts_show_the_numbers_in_the_tree() {
    let script = root().join("scripts/figures.py");
    let done = match Command::new("python3").arg(script).arg("--check").output() {
        Ok(done) => done,
        Err(error) => return println!("SKIPPED: python3 does not start: {error}"),
    };
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// The pinned nightly is named where the builds read it; recorded outputs say what wrote them.
#[test]
fn the_nightly_is_named_in_one_place() {
    let place = Path::new("hexagon-ops/tools/library.sh");
    let recorded = [
        "hexagon-ops/tests/packets.txt",
        "hexagon-ops/tests/skel.txt",
    ]
    .map(Path::new);
    let named = read(place);
    let nightly = named
        .lines()
        .find_map(|line| line.strip_prefix("toolchain="))
        .unwrap();
    let elsewhere: Vec<_> = files()
        .into_iter()
        .filter(|file| file != place && !recorded.contains(&file.as_path()))
        .filter(|file| {
            std::fs::read_to_string(root().join(file)).is_ok_and(|text| text.contains(nightly))
        })
        .collect();
    assert!(
        elsewhere.is_empty(),
        "{nightly} is also written in {elsewhere:?}"
    );
}
