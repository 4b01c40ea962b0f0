//! The versions of ggml that the glue was written for, and the lines that refuse others.

/// Minor versions of ggml 0.x with the backend API 2. The numbers of operations are those of the
/// headers from 0.21 on.
// SOURCE: ggml.h and ggml-backend-impl.h of ggml 0.21.0, 0.25.1 and 0.25.3.
const API_2: std::ops::RangeInclusive<u32> = 21..=25;

/// Minor versions of ggml 0.x with the backend API 3.
// SOURCE: ggml-backend-impl.h of ggml 0.26.0; Debian's libggml0 0.27.0 was run.
const API_3: std::ops::RangeInclusive<u32> = 26..=27;

/// A version of ggml's backend API: the layout of its structs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `GGML_BACKEND_API_VERSION` 2.
    Two,
    /// `GGML_BACKEND_API_VERSION` 3.
    Three,
}

/// Returns the API of a version of ggml such as `0.25.3`.
///
/// # Errors
/// A line for the user if the version is not known.
pub fn api_of(version: &str) -> Result<Api, String> {
    let mut numbers = version.split(['.', '-']).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return Err(format!(
            "this program has ggml {version:?}, a version that {} cannot read; {KNOWN}",
            ours()
        ));
    };
    match (major, minor) {
        (0, minor) if API_2.contains(&minor) => Ok(Api::Two),
        (0, minor) if API_3.contains(&minor) => Ok(Api::Three),
        (0, minor) if minor < *API_2.start() => Err(format!(
            "this program has ggml {version}, which is too old for {}: install a newer version of the program; {KNOWN}",
            ours()
        )),
        _ => Err(format!(
            "this program has ggml {version}, which is newer than {} knows: install a newer ggml-rust-npu; {KNOWN}",
            ours()
        )),
    }
}

/// The range of versions, for lines that refuse another one.
pub const KNOWN: &str = "it works with ggml 0.21 to 0.27";

/// Returns the name and the version of this backend.
pub fn ours() -> String {
    format!("ggml-rust-npu {}", env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_versions_have_an_api() {
        for version in ["0.21.0", "0.25.1", "0.25.3", "0.25.3-dev"] {
            assert_eq!(api_of(version), Ok(Api::Two), "{version}");
        }
        for version in ["0.26.0", "0.27.0", "0.27"] {
            assert_eq!(api_of(version), Ok(Api::Three), "{version}");
        }
    }

    #[test]
    fn other_versions_are_refused_with_both_versions_and_a_remedy() {
        for (version, remedy) in [
            ("0.13.1", "a newer version of the program"),
            ("0.20.9", "a newer version of the program"),
            ("0.28.0", "a newer ggml-rust-npu"),
            ("1.21.0", "a newer ggml-rust-npu"),
            ("", "cannot read"),
            ("v0.21", "cannot read"),
        ] {
            let line = api_of(version).expect_err(version);
            assert!(line.contains(version) && line.contains(remedy), "{line}");
            assert!(line.contains(env!("CARGO_PKG_VERSION")), "{line}");
        }
    }

    #[test]
    fn the_line_names_the_range() {
        let range = format!("ggml 0.{} to 0.{}", API_2.start(), API_3.end());
        assert!(KNOWN.contains(&range), "{KNOWN}");
    }
}
