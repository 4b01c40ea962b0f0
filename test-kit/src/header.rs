use std::collections::BTreeMap;
use std::{env, fs};

/// Comparisons with bindgen's output for C headers, which the program of test-kit/bindings prints.
///
/// ```no_run
/// use test_kit::Header;
///
/// let mut header = Header::of("RKNN_BINDINGS");
/// header.expect("RKNN_SUCC", 0);
/// header.expect_struct("rknn_matmul_shape", 12, &[("M", 0), ("K", 4), ("N", 8)]);
/// header.check();
/// ```
#[derive(Debug, Default)]
pub struct Header {
    values: BTreeMap<String, i64>,
    sizes: BTreeMap<String, usize>,
    /// Names and offsets, by struct.
    fields: BTreeMap<String, Vec<(String, usize)>>,
    /// Types by their other names.
    aliases: BTreeMap<String, String>,
    wrong: Vec<String>,
}

/// Returns the text between `start` and `end`. `start` is not a part of it.
fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    Some(rest.split_once(end)?.0.trim())
}

impl Header {
    /// Reads the bindings in the file that an environment variable names.
    ///
    /// # Panics
    /// If the variable is not set, or its file cannot be read.
    #[must_use]
    pub fn of(variable: &str) -> Self {
        let mut all = Self::of_each(variable);
        assert_eq!(all.len(), 1, "{variable} names one file");
        all.remove(0)
    }

    /// Reads the bindings in the files that an environment variable names, separated by colons.
    ///
    /// # Panics
    /// As [`of`](Self::of).
    #[must_use]
    pub fn of_each(variable: &str) -> Vec<Self> {
        let files = env::var_os(variable).unwrap_or_else(|| panic!("{variable} is not set"));
        let text = |file| fs::read_to_string(file).expect("the bindings are read");
        env::split_paths(&files)
            .map(|file| Self::parse(&text(file)))
            .collect()
    }

    /// Reads bindings as bindgen writes them.
    ///
    /// # Panics
    /// If the text has neither constants nor structs.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for statement in text.split(';') {
            let statement = statement.split_whitespace().collect::<Vec<_>>().join(" ");
            found.read(&statement);
        }
        assert!(
            !found.values.is_empty() || !found.sizes.is_empty(),
            "these are no bindings"
        );
        found
    }

    fn read(&mut self, statement: &str) {
        let number = || between(statement, ") - ", "usize]")?.parse().ok();
        if let Some(name) = between(statement, "\"Size of ", "\"") {
            self.sizes
                .extend(number().map(|bytes| (name.to_owned(), bytes)));
        } else if let Some((name, field)) =
            between(statement, "\"Offset of field: ", "\"").and_then(|path| path.split_once("::"))
        {
            let fields = self.fields.entry(name.to_owned()).or_default();
            fields.extend(number().map(|offset| (field.to_owned(), offset)));
        } else if let Some((_, constant)) = statement.split_once("pub const ") {
            if let (Some((name, _)), Some((_, value))) =
                (constant.split_once(':'), constant.split_once(" = "))
            {
                let value = value.parse().ok();
                self.values
                    .extend(value.map(|value| (name.to_owned(), value)));
            }
        } else if let Some((_, alias)) = statement.split_once("pub type ") {
            let names = alias.split_once(" = ");
            self.aliases
                .extend(names.map(|(new, old)| (new.to_owned(), old.to_owned())));
        }
    }

    /// Returns the name under which a struct is declared.
    fn declared<'a>(&'a self, name: &'a str) -> &'a str {
        self.aliases.get(name).map_or(name, String::as_str)
    }

    /// Returns the constants whose names begin with `start`, without it.
    #[must_use]
    pub fn values(&self, start: &str) -> Vec<(&str, i64)> {
        let found = self.values.iter();
        found
            .filter_map(|(name, value)| Some((name.strip_prefix(start)?, *value)))
            .collect()
    }

    /// Returns the bytes of a struct, if the headers have it.
    #[must_use]
    pub fn size(&self, name: &str) -> Option<usize> {
        self.sizes.get(self.declared(name)).copied()
    }

    /// Compares a constant. Both count as C's `int`: 0x80000406 is a negative number, too.
    ///
    /// # Panics
    /// If the value is not one of i64.
    pub fn expect(&mut self, name: &str, value: impl TryInto<i64>) {
        let want = value
            .try_into()
            .unwrap_or_else(|_| panic!("{name} is wider than 64 bits"));
        match self.values.get(name) {
            Some(have) if have.wrapping_sub(want).trailing_zeros() >= 32 => {}
            have => {
                let line = format!("{name} is {have:?}, not {want}");
                self.wrong.push(line);
            }
        }
    }

    /// Compares the bytes of a struct or union.
    pub fn expect_size(&mut self, name: &str, bytes: usize) {
        let have = self.size(name);
        if have != Some(bytes) {
            self.wrong
                .push(format!("{name} has {have:?} bytes, not {bytes}"));
        }
    }

    /// Compares a struct: its bytes, and all of its fields with their offsets.
    pub fn expect_struct(&mut self, name: &str, bytes: usize, fields: &[(&str, usize)]) {
        self.expect_size(name, bytes);
        let declared = self.fields.get(self.declared(name));
        // bindgen writes `type_` for a field whose name is a Rust keyword.
        let mut have: Vec<(&str, usize)> = declared.into_iter().flatten().map(field).collect();
        let mut want = fields.to_vec();
        have.sort_unstable();
        want.sort_unstable();
        if have != want {
            let line = format!("{name} has the fields {have:?}, not {want:?}");
            self.wrong.push(line);
        }
    }

    /// Ends the comparison.
    ///
    /// # Panics
    /// If something differs or is missing in the headers.
    pub fn check(&self) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
    }
}

fn field((name, offset): &(String, usize)) -> (&str, usize) {
    (name.strip_suffix('_').unwrap_or(name), *offset)
}

/// Compares size and fields of a struct: `layout!(header, Rust = "C" { field = "field", … })`.
#[macro_export]
macro_rules! layout {
    ($header:ident, $name:ty = $c:literal { $($field:ident = $member:literal),* $(,)? }) => {
        $header.expect_struct(
            $c,
            size_of::<$name>(),
            &[$(($member, ::core::mem::offset_of!($name, $field))),*],
        );
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        pub const RKNN_MAX_DIMS: u32 = 16;
        pub const RKNN_ERR_FAIL: i32 = -1;
        pub const DSP_OFFSET: u32 = 2147484672;
        pub const NAME: &[u8; 5] = b"cdsp\0";
        #[repr(C)]
        pub struct _shape {
            pub M: i32,
            pub type_: i32,
        }
        #[allow(clippy::unnecessary_operation, clippy::identity_op)]
        const _: () = {
            ["Size of _shape"][::std::mem::size_of::<_shape>() - 8usize];
            ["Alignment of _shape"][::std::mem::align_of::<_shape>() - 4usize];
            ["Offset of field: _shape::M"][::std::mem::offset_of!(_shape, M) - 0usize];
            [
                "Offset of field: _shape::type_",
            ][::std::mem::offset_of!(_shape, type_) - 4usize];
        };
        pub type shape = _shape;
    "#;

    fn wrong(compare: impl FnOnce(&mut Header)) -> Vec<String> {
        let mut header = Header::parse(TEXT);
        compare(&mut header);
        header.wrong
    }

    #[test]
    fn constants_and_structs_of_the_headers_are_found() {
        let found = wrong(|header| {
            header.expect("RKNN_MAX_DIMS", 16_usize);
            header.expect("RKNN_ERR_FAIL", -1);
            header.expect("DSP_OFFSET", 0x8000_0400_u32.cast_signed());
            header.expect_struct("shape", 8, &[("type", 4), ("M", 0)]);
            header.expect_size("_shape", 8);
            assert_eq!(header.values("RKNN_M"), [("AX_DIMS", 16)]);
        });
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn what_differs_or_is_missing_is_named() {
        let found = wrong(|header| {
            header.expect("RKNN_MAX_DIMS", 15);
            header.expect("NAME", 0);
            header.expect("GONE", 0);
            header.expect_size("gone", 8);
            header.expect_struct("shape", 8, &[("M", 0)]);
            header.expect_struct("shape", 12, &[("M", 0), ("type", 8)]);
        });
        assert_eq!(
            found,
            [
                "RKNN_MAX_DIMS is Some(16), not 15",
                "NAME is None, not 0",
                "GONE is None, not 0",
                "gone has None bytes, not 8",
                r#"shape has the fields [("M", 0), ("type", 4)], not [("M", 0)]"#,
                "shape has Some(8) bytes, not 12",
                r#"shape has the fields [("M", 0), ("type", 4)], not [("M", 0), ("type", 8)]"#,
            ]
        );
    }
}
