//! Proves that the libraries for the DSP link, have the form that FastRPC's loader requires, import
//! only symbols that other unsigned libraries import, too (tests/imports.txt), hold only known
//! matrix packets, use at most 128 KiB of stack, have the size that tests/skel.txt records to
//! within 20 %, neither copy nor store a qfloat value, and have no instruction that their
//! architecture lacks. Skipped with a printed reason without the pinned nightly or lld.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

mod common;

use std::path::Path;
use std::process::Command;

use common::matrix::check_packets;
use common::{LIBRARIES, Skip, skel};

/// The import that only libraries for V79 and later have.
const LATE_IMPORT: &str = "sysmon_set_dcvs_v3_protected_bus_corners";

/// Returns the imports that tests/imports.txt allows a library, with `true` for a weak one.
fn allowed_imports(library: &str) -> Vec<(&'static str, bool)> {
    let rows = include_str!("imports.txt").lines();
    let rows = rows.filter_map(|line| {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        match words.next()? {
            "weak" => Some((name, true)),
            "strong" => Some((name, false)),
            _ => None,
        }
    });
    rows.filter(|(name, _)| *name != LATE_IMPORT || ["v79", "v81"].contains(&library))
        .collect()
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_HEXAGON_VER: u32 = 0x7000_0001;

/// A 32-bit little-endian ELF file.
struct Elf(Vec<u8>);

impl Elf {
    fn half(&self, at: usize) -> usize {
        usize::from(u16::from_le_bytes([self.0[at], self.0[at + 1]]))
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn size(&self, at: usize) -> usize {
        usize::try_from(self.word(at)).unwrap()
    }

    fn text(&self, at: usize) -> &str {
        let end = self.0[at..].iter().position(|byte| *byte == 0).unwrap();
        std::str::from_utf8(&self.0[at..at + end]).unwrap()
    }

    /// Offsets of the program headers.
    fn segments(&self) -> Vec<usize> {
        (0..self.half(44))
            .map(|i| self.size(28) + i * self.half(42))
            .collect()
    }

    /// Offset and bytes of a section.
    fn section(&self, name: &str) -> (usize, usize) {
        let header = |i: usize| self.size(32) + i * self.half(46);
        let names = self.size(header(self.half(50)) + 16);
        let found = (0..self.half(48))
            .map(header)
            .find(|at| self.text(names + self.size(*at)) == name);
        let at = found.unwrap_or_else(|| panic!("no section {name}"));
        (self.size(at + 16), self.size(at + 20))
    }

    /// (tag, value) of the dynamic section.
    fn dynamic(&self) -> Vec<(u32, u32)> {
        let (start, bytes) = self.section(".dynamic");
        (start..start + bytes)
            .step_by(8)
            .map(|at| (self.word(at), self.word(at + 4)))
            .take_while(|entry| entry.0 != 0)
            .collect()
    }

    /// Names of the symbols that it exports.
    fn exports(&self) -> Vec<&str> {
        let ((start, bytes), (names, _)) = (self.section(".dynsym"), self.section(".dynstr"));
        (start..start + bytes)
            .step_by(16)
            .skip(1)
            .filter(|at| self.half(at + 14) != 0)
            .map(|at| self.text(names + self.size(at)))
            .collect()
    }

    /// Imports, with `true` for a weak one.
    fn imports(&self) -> Vec<(&str, bool)> {
        const WEAK: u8 = 2;
        let ((start, bytes), (names, _)) = (self.section(".dynsym"), self.section(".dynstr"));
        let mut found: Vec<(&str, bool)> = (start..start + bytes)
            .step_by(16)
            .skip(1)
            .filter(|at| self.half(at + 14) == 0)
            .map(|at| {
                (
                    self.text(names + self.size(at)),
                    self.0[at + 12] >> 4 == WEAK,
                )
            })
            .collect();
        found.sort_unstable();
        found
    }
}

/// Runs tools/check.py on a library, which fails if a qfloat value leaves its register unless
/// `stored` allows it, and returns the bytes of its stack.
fn check_code(library: &Path, stored: &[&str]) -> Result<usize, Skip> {
    let objdump = "llvm-objdump-22";
    if Command::new(objdump).arg("--version").output().is_err() {
        return Err(format!("{objdump} is not installed"));
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/check.py");
    let output = Command::new("python3")
        .arg(script)
        .arg(objdump)
        .arg(library)
        .args(stored)
        .output()
        .map_err(|e| format!("python3: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "check.py: {complaint}");
    let mut lines = text.lines();
    let stack = lines.find_map(|line| line.strip_prefix("stack "));
    Ok(stack.unwrap().parse().unwrap())
}

/// Runs tools/newer.py on a library, which fails if an instruction is newer than `arch`, and
/// returns the packets that it looked at.
fn check_age(library: &Path, arch: &str) -> Result<usize, Skip> {
    let tools = ["llvm-objdump-22", "llvm-mc-22"];
    for tool in tools {
        if Command::new(tool).arg("--version").output().is_err() {
            return Err(format!("{tool} is not installed"));
        }
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/newer.py");
    let output = Command::new("python3")
        .arg(script)
        .args(tools)
        .arg(library)
        .arg(arch)
        .output()
        .map_err(|e| format!("python3: {e}"))?;
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "newer.py: {complaint}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.trim().trim_start_matches("packets ").parse().unwrap())
}

/// Returns the bytes of a library's code in tests/skel.txt.
fn recorded(library: &str) -> Option<usize> {
    let table = include_str!("skel.txt");
    let mut lines = table.lines().map(|line| line.split_whitespace());
    let mut line = lines.find(|line| line.clone().next() == Some(library))?;
    line.nth(1)?.parse().ok()
}

#[test]
#[ignore = "builds for the DSP with the pinned nightly: make dsp"]
fn libraries_have_the_form_that_the_loader_wants() {
    for (library, flags) in LIBRARIES
        .into_iter()
        .zip([0x68, 0x69, 0x73, 0x73, 0x75, 0x79, 0x81])
    {
        let path = match skel(library) {
            Ok(path) => path,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        let elf = Elf(std::fs::read(&path).unwrap());
        assert_eq!(&elf.0[..6], b"\x7fELF\x01\x01", "{library}");
        // The file must be a shared object for Hexagon, of this architecture.
        assert_eq!((elf.half(16), elf.half(18)), (3, 164), "{library}");
        assert_eq!(elf.word(36), flags, "{library}");

        let segments = elf.segments();
        let kinds: Vec<(u32, u32)> = segments
            .iter()
            .map(|at| (elf.word(*at), elf.word(at + 24)))
            .collect();
        assert_eq!(
            kinds,
            [(PT_LOAD, 5), (PT_LOAD, 6), (PT_DYNAMIC, 6)],
            "{library}"
        );
        for at in &segments[..2] {
            assert_eq!(elf.word(at + 28), 4096, "{library}: pages");
            assert_eq!(
                elf.word(at + 4) % 4096,
                elf.word(at + 8) % 4096,
                "{library}"
            );
        }

        let dynamic = elf.dynamic();
        assert!(dynamic.contains(&(DT_HEXAGON_VER, 3)), "{library}");
        let soname = dynamic.iter().find(|entry| entry.0 == 14).unwrap().1;
        let names = elf.section(".dynstr").0;
        assert_eq!(
            elf.text(names + usize::try_from(soname).unwrap()),
            format!("libggml_rust_npu_skel_{library}.so")
        );
        assert_eq!(elf.exports(), ["ggml_rust_npu_skel_handle_invoke"]);
        assert_eq!(elf.imports(), allowed_imports(library), "{library}");

        let (start, bytes) = elf.section(".text");
        let words: Vec<u32> = (start..start + bytes)
            .step_by(4)
            .map(|at| elf.word(at))
            .collect();
        let counts = check_packets(&words);
        assert!(
            counts.iter().all(|count| *count > 0),
            "{library}: {counts:?}"
        );
        assert_eq!(
            counts[0], counts[1],
            "activations and weights come in pairs"
        );
        println!(
            "{library}: {bytes} bytes of code, {} of the file, matrix words {counts:?}",
            elf.0.len()
        );
        let want = recorded(library).unwrap_or_else(|| panic!("tests/skel.txt lacks {library}"));
        assert!(
            bytes.abs_diff(want) * 5 <= want,
            "{library}: {bytes} bytes of code, tests/skel.txt says {want}"
        );
        let is_old = matches!(library, "v68" | "v69");
        match check_code(&path, if is_old { &["stored"] } else { &[] }) {
            Ok(stack) if is_old => println!("{library}: {stack} bytes of stack"),
            Ok(stack) => {
                println!("{library}: {stack} bytes of stack, no qfloat value leaves its register");
            }
            Err(reason) => println!("SKIPPED stack and qfloat values of {library}: {reason}"),
        }
        // Newer versions have all instructions that the kernels use, so only old ones are checked.
        if is_old {
            match check_age(&path, library) {
                Ok(packets) => println!("{library}: none of {packets} packets is newer"),
                Err(reason) => println!("SKIPPED instructions of {library}: {reason}"),
            }
        }
    }
}
