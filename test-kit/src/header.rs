use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

/// Comparisons with what a C compiler finds in headers.
///
/// ```no_run
/// use test_kit::Header;
///
/// let mut header = Header::of("RKNN_INCLUDE", &["rknn_api.h"]);
/// header.expect("sizeof(rknn_input)", 40);
/// header.check();
/// ```
#[derive(Debug)]
pub struct Header {
    folder: PathBuf,
    includes: String,
    wanted: Vec<(String, i64)>,
}

impl Header {
    /// Starts a comparison with headers in the folder that an environment variable names.
    ///
    /// # Panics
    /// If the variable is not set.
    #[must_use]
    pub fn of(variable: &str, names: &[&str]) -> Self {
        let folder = env::var_os(variable).unwrap_or_else(|| panic!("{variable} is not set"));
        let names = ["stddef.h", "stdio.h"].iter().chain(names);
        Self {
            folder: folder.into(),
            includes: names.map(|name| format!("#include <{name}>\n")).collect(),
            wanted: Vec::new(),
        }
    }

    /// Adds a constant expression of C, and its value.
    ///
    /// # Panics
    /// If the value is not one of i64.
    pub fn expect(&mut self, expression: impl Into<String>, value: impl TryInto<i64>) {
        let expression = expression.into();
        let value = value
            .try_into()
            .unwrap_or_else(|_| panic!("{expression} is wider than 64 bits"));
        self.wanted.push((expression, value));
    }

    /// Compiles and runs a program that prints the expressions.
    ///
    /// # Panics
    /// If there is no C compiler (`CC`, or `cc`), the headers lack something, or a value differs.
    pub fn check(&self) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (source, program) = (folder.path().join("print.c"), folder.path().join("print"));
        let mut text = format!("{}int main(void) {{\n", self.includes);
        for (expression, _) in &self.wanted {
            writeln!(text, "printf(\"%lld\\n\", (long long)({expression}));").expect("text grows");
        }
        text.push_str("return 0; }\n");
        fs::write(&source, text).expect("the program is written");
        let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
        let mut compile = Command::new(&compiler);
        compile
            .arg("-I")
            .arg(&self.folder)
            .arg(&source)
            .arg("-o")
            .arg(&program);
        let compiled = compile.output().expect("a C compiler starts");
        let errors = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{errors}");
        let printed = Command::new(program).output().expect("the program starts");
        let printed = String::from_utf8_lossy(&printed.stdout);
        let have: Vec<i64> = printed
            .lines()
            .map_while(|line| line.parse().ok())
            .collect();
        assert_eq!(have.len(), self.wanted.len(), "{printed}");
        let wrong: Vec<String> = (self.wanted.iter().zip(have))
            .filter(|((_, want), have)| want != have)
            .map(|((expression, want), have)| format!("{expression} is {have}, not {want}"))
            .collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

/// Compares size and offsets of a struct: `layout!(header, Rust = "C" { field = "field", … })`.
#[macro_export]
macro_rules! layout {
    ($header:ident, $name:ty = $c:literal { $($field:ident = $member:literal),* $(,)? }) => {
        $header.expect(concat!("sizeof(", $c, ")"), size_of::<$name>());
        $($header.expect(
            concat!("offsetof(", $c, ", ", $member, ")"),
            ::core::mem::offset_of!($name, $field),
        );)*
    };
}
