//! Proves that the documentation is true of the tree: links, paths and commands exist, the folder
//! map is complete, charts show the numbers, pages are reachable, the README stays short.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines of the page that a person reads first.
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

/// Returns the modules and folders in `folder`: names of folders, and of Rust files without their
/// ending.
fn modules(folder: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let kept = paths.filter(|path| {
        path.is_dir() || path.extension().is_some_and(|extension| extension == "rs")
    });
    let names = kept.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned());
    let named = names.filter(|name| {
        !name.starts_with('.') && !["build", "lib", "mod", "target"].contains(&name.as_str())
    });
    named
        .map(|name| {
            if folder.is_empty() {
                name
            } else {
                format!("{folder}/{name}")
            }
        })
        .collect()
}

/// Returns `path`, or two paths if it contains `{a,b}`.
fn expanded(path: &str) -> Vec<String> {
    let Some((start, rest)) = path.split_once('{') else {
        return vec![path.to_owned()];
    };
    let (choices, end) = rest.split_once('}').unwrap();
    choices
        .split(',')
        .map(|choice| format!("{start}{choice}{end}"))
        .collect()
}

#[test]
fn the_folder_map_is_the_tree() {
    let text = read(Path::new("ARCHITECTURE.md"));
    let map = text.split("## Folder map").nth(1).unwrap();
    let cells = map
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let drawn: BTreeSet<String> = cells.flat_map(|(path, _)| expanded(path)).collect();

    let mut there = modules("");
    for folder in ["src", "src/hexagon", "src/rockchip"] {
        there.extend(modules(folder));
    }
    there.extend(modules("hexagon-ops"));
    // The figure shows these two as the families, which other tables describe.
    there.retain(|path| path != "src/hexagon" && path != "src/rockchip");

    let missing: Vec<_> = there.difference(&drawn).collect();
    let gone: Vec<_> = drawn.difference(&there).collect();
    assert!(
        missing.is_empty(),
        "ARCHITECTURE.md's folder map lacks {missing:?}"
    );
    assert!(
        gone.is_empty(),
        "ARCHITECTURE.md's folder map has {gone:?}, which are not in the tree"
    );
}

#[test]
fn every_path_in_a_page_exists() {
    let folders = modules("");
    let mut wrong = Vec::new();
    for (page, text) in pages() {
        // A changelog may name files that no longer exist.
        if page.ends_with("CHANGELOG.md") {
            continue;
        }
        for path in prose(&text).flat_map(|line| line.split('`').skip(1).step_by(2)) {
            let plain = |c: char| c.is_alphanumeric() || "/_.-".contains(c);
            let is_path = path
                .split_once('/')
                .is_some_and(|(first, _)| folders.contains(first))
                && path.chars().all(plain);
            if is_path && !root().join(path).exists() && !root().join(format!("{path}.rs")).exists()
            {
                wrong.push(format!("{}: {path}", page.display()));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "paths that do not exist:\n{}",
        wrong.join("\n")
    );
}

/// Returns the pieces of a page that are code: spans between backticks, and lines of fenced blocks.
fn code(text: &str) -> Vec<&str> {
    let spans = prose(text).flat_map(|line| line.split('`').skip(1).step_by(2));
    let fenced = text.split("```").skip(1).step_by(2).flat_map(str::lines);
    spans.chain(fenced).collect()
}

#[test]
fn every_make_target_in_a_page_exists() {
    let makefile = read(Path::new("Makefile"));
    let targets: BTreeSet<_> = makefile
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(target, _)| target)
        .collect();
    let workflow = read(Path::new(".github/workflows/ci.yml"));
    let jobs = workflow
        .split("target: ")
        .skip(1)
        .filter_map(|rest| rest.split(',').next());
    let mut wrong: Vec<_> = jobs
        .filter(|target| !targets.contains(target))
        .map(|target| format!("ci.yml: {target}"))
        .collect();
    let pages = pages();
    let commands = pages
        .iter()
        .flat_map(|(page, text)| code(text).into_iter().map(move |command| (page, command)));
    for (page, command) in commands {
        let mut words = command
            .split_whitespace()
            .skip_while(|word| *word != "make")
            .skip(1);
        let named = words
            .by_ref()
            .take_while(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '-'));
        wrong.extend(
            named
                .filter(|target| !targets.contains(target))
                .map(|target| format!("{}: make {target}", page.display())),
        );
    }
    assert!(
        wrong.is_empty(),
        "targets that the Makefile does not have:\n{}",
        wrong.join("\n")
    );
}

/// Charts, and tables of counts, are written by a script from measurements.
#[test]
fn charts_show_the_numbers_in_the_tree() {
    // The page of speed is checked by the tool's test: tool/tests/model.rs.
    for (script, pages) in [
        ("scripts/figures.py", None),
        ("scripts/how_good.py", None),
        ("scripts/results.py", Some("packets")),
    ] {
        let script = root().join(script);
        let mut command = Command::new("python3");
        let done = match command.arg(script).arg("--check").args(pages).output() {
            Ok(done) => done,
            Err(error) => return println!("SKIPPED: python3 does not start: {error}"),
        };
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
    }
}

/// Returns the ratios of a column of docs/results/tables/whole.md, with the headings that they
/// stand below.
fn ratios(column: usize) -> Vec<(String, f64)> {
    let page = read(Path::new("docs/results/tables/whole.md"));
    let (mut heading, mut found) = (String::new(), Vec::new());
    for line in page.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            heading = text.to_owned();
        }
        let ratio = line.split('|').nth(column).map(str::trim);
        if let (true, Some(Ok(ratio))) = (line.starts_with("| `"), ratio.map(str::parse)) {
            found.push((heading.clone(), ratio));
        }
    }
    found
}

/// Regression: the README claimed fewer packets for all operations.
#[test]
fn the_readme_says_of_whole_operations_what_was_counted() {
    let readme = read(Path::new("README.md")).replace('\n', " ");
    let says = |words: String| assert!(readme.contains(&words), "README.md does not say: {words}");
    let columns = [ratios(4), ratios(7)];
    says(format!("compares {} of them", columns[0].len()));
    let mut counts = Vec::new();
    for column in &columns {
        let is_product = |heading: &str| heading == "Products with weights";
        let (products, others): (Vec<_>, Vec<_>) =
            column.iter().partition(|(heading, _)| is_product(heading));
        assert!(!products.is_empty() && products.iter().all(|(_, ratio)| *ratio < 1.0));
        let more = others.iter().filter(|(_, ratio)| *ratio > 1.0).count();
        counts.push(format!("{more} of {}", others.len()));
    }
    says("All products with weights take fewer packets".into());
    says(format!(
        "{} take more packets on V73, and {} on V79",
        counts[0], counts[1]
    ));
}

/// The guide was silent about the vendor's driver on mainline kernels, and about chips that nothing
/// else serves.
#[test]
fn the_pages_name_every_rockchip_and_the_drivers_it_may_have() {
    let known: Vec<String> = (3500..3700)
        .map(|number| format!("RK{number}"))
        .filter(|name| rknpu_ops::layout::Soc::from_name(name).is_some())
        .collect();
    assert_eq!(known.len(), 5, "{known:?}");
    let guide = read(Path::new("docs/guide/rockchip.md")).replace("RK3566/68", "RK3566, RK3568");
    for (page, text) in [
        ("README.md", &read(Path::new("README.md"))),
        ("rockchip.md", &guide),
    ] {
        for name in &known {
            assert!(text.contains(name.as_str()), "{page} does not name {name}");
        }
    }
    for driver in ["`rknpu`", "DKMS", "`rocket`"] {
        assert!(guide.contains(driver), "rockchip.md does not name {driver}");
    }
}

/// The pinned nightly is named where the builds read it; recorded outputs name the compiler that
/// wrote them.
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

/// Compares the example of CONTRIBUTING.md with the tree: adding an operation of one element
/// touches two files and a test.
#[test]
fn the_example_of_an_operation_is_the_whole_code_of_softplus() {
    let guide = read(Path::new("CONTRIBUTING.md"));
    let diff = guide.split("```diff\n").nth(1).unwrap();
    let diff = diff.split("```").next().unwrap();
    let mut shown = BTreeSet::new();
    let mut code = String::new();
    for line in diff.lines() {
        if let Some(path) = line.strip_prefix("--- a/") {
            shown.insert(PathBuf::from(path));
            code = read(Path::new(path));
        } else if let Some(added) = line.strip_prefix('+') {
            let is_there = code.lines().any(|line| line.trim() == added.trim());
            assert!(
                is_there,
                "CONTRIBUTING.md shows a line that no file has: {added}"
            );
        }
    }
    let this = Path::new(file!());
    let names_it = |file: &PathBuf| {
        let is_code = file
            .extension()
            .is_some_and(|e| e == "rs" || e == "c" || e == "h");
        // A fuzz target has references for some functions only, and ggml-hexagon has only some. A
        // new operation need not be in these lists.
        let is_choice =
            file == this || file.starts_with("fuzz") || file.starts_with("hexagon-ops/tools/peer");
        is_code && !is_choice && read(file).to_lowercase().contains("softplus")
    };
    let have: BTreeSet<PathBuf> = files().into_iter().filter(names_it).collect();
    assert_eq!(have, shown);
    assert_eq!(shown.len(), 3, "two files and a test");
}

/// The Rust files below a folder, without those that builds write.
fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            rust_files(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// Docs of functions begin with a verb, docs of types with a noun phrase.
#[test]
fn no_doc_comment_begins_with_a_question_word() {
    let mut files = Vec::new();
    rust_files(Path::new(env!("CARGO_MANIFEST_DIR")), &mut files);
    let mut wrong = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let mut is_doc = false;
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim_start();
            let doc = ["///", "//!"].iter().find_map(|tag| line.strip_prefix(tag));
            let word = doc.and_then(|doc| doc.split_whitespace().next());
            let is_question = matches!(word, Some("What" | "Whether" | "How" | "Where"));
            if is_question && !is_doc {
                wrong.push(format!("{}:{number}: {line}", file.display()));
            }
            is_doc = doc.is_some();
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the text of a message in the source with `…` for its values.
fn shown(literal: &str) -> String {
    let joined = regex_lite::Regex::new(r"\\\n\s*").unwrap();
    let value = regex_lite::Regex::new(r"\{[^}]*\}|%[a-z]+").unwrap();
    let text = joined.replace_all(literal, "");
    value.replace_all(&text, "…").replace(r"\n", "")
}

/// Returns the messages of errors and of warnings, without those that only join others.
fn messages() -> BTreeSet<String> {
    let literal = r#""((?:[^"\\]|\\.|\\\n)*)""#;
    let kinds = [
        format!(r"#\[error\(\s*{literal}"),
        format!(r"log::(?:error|warn)!\(\s*{literal}"),
        format!(r"Absence::Unusable\(format!\(\s*{literal}"),
        r#"GGML_LOG_(?:ERROR|WARN)\(\s*((?:"[^"]*"\s*)+)"#.to_owned(),
    ]
    .map(|pattern| regex_lite::Regex::new(&pattern).unwrap());
    let folders = ["src", "ggml-glue", "tool/src", "scale/src"];
    let mut found = BTreeSet::new();
    for file in files() {
        let is_code = file.extension().is_some_and(|e| e == "rs" || e == "c");
        if !is_code || !folders.iter().any(|folder| file.starts_with(folder)) {
            continue;
        }
        let text = read(&file);
        let text = text.split("#[cfg(test)]").next().unwrap();
        for kind in &kinds {
            for captures in kind.captures_iter(text) {
                // The parts of a C string are joined without the text between their quotes.
                let parts: String = if captures[1].starts_with('"') {
                    captures[1].split('"').skip(1).step_by(2).collect()
                } else {
                    captures[1].to_owned()
                };
                found.insert(shown(
                    parts.strip_prefix("ggml-rust-npu: ").unwrap_or(&parts),
                ));
            }
        }
    }
    found.retain(|text| text.chars().any(char::is_alphabetic) && text != "…: …");
    found
}

#[test]
fn the_page_of_errors_has_every_message_of_the_source() {
    let page = read(Path::new("docs/guide/errors.md"));
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    let named: BTreeSet<String> = cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    let messages = messages();
    assert!(messages.len() > 60, "{} messages", messages.len());
    let missing: Vec<_> = messages.difference(&named).collect();
    let gone: Vec<_> = named.difference(&messages).collect();
    assert!(
        missing.is_empty(),
        "docs/guide/errors.md lacks {missing:#?}"
    );
    assert!(
        gone.is_empty(),
        "no code has these of docs/guide/errors.md: {gone:#?}"
    );
}
