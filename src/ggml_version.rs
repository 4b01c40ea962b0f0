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

/// The user's choice for programs whose ggml is newer than the known versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NewerGgml {
    /// The structs and numbers of the program's ggml are checked, and it is used if they agree.
    #[default]
    Probe,
    /// The program's ggml is refused.
    Strict,
}

/// The relation of a version of ggml to those that the glue was written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// A known version.
    Known(Api),
    /// A newer one. It may have this API: ggml itself refuses a backend of another one.
    Newer(Api),
}

/// Returns how a version of ggml, such as `0.25.3`, relates to the known ones.
///
/// - `newer`: how the user wants a newer version than the known ones to be treated
///
/// # Errors
/// A line for the user if the version is too old, newer although the user refuses newer ones, or
/// not a version.
pub fn fit_of(version: &str, newer: NewerGgml) -> Result<Fit, String> {
    let mut numbers = version.split(['.', '-']).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return Err(format!(
            "this program has ggml {version:?}, a version that {} cannot read; {KNOWN}",
            ours()
        ));
    };
    match (major, minor) {
        (0, minor) if API_2.contains(&minor) => Ok(Fit::Known(Api::Two)),
        (0, minor) if API_3.contains(&minor) => Ok(Fit::Known(Api::Three)),
        (0, minor) if minor < *API_2.start() => Err(format!(
            "this program has ggml {version}, which is too old for {}: install a newer version of the program; {KNOWN}",
            ours()
        )),
        _ if newer == NewerGgml::Probe => Ok(Fit::Newer(Api::Three)),
        _ => Err(format!(
            "this program has ggml {version}, which is newer than {} knows: install a newer ggml-rust-npu, or unset \
             GGML_RUST_NPU_GGML; {KNOWN}",
            ours()
        )),
    }
}

/// Returns the warning about a ggml that is newer than the known ones and is used nevertheless.
pub fn newer_line(version: &str) -> String {
    format!(
        "this program has ggml {version}, which is newer than {} knows ({KNOWN}): what was asked of it agrees, so its \
         devices are used, and operations that cannot be asked about are left to the CPU; GGML_RUST_NPU_GGML=strict \
         refuses such versions",
        ours()
    )
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
        for newer in [NewerGgml::Probe, NewerGgml::Strict] {
            for version in ["0.21.0", "0.25.1", "0.25.3", "0.25.3-dev"] {
                assert_eq!(
                    fit_of(version, newer),
                    Ok(Fit::Known(Api::Two)),
                    "{version}"
                );
            }
            for version in ["0.26.0", "0.27.0", "0.27"] {
                assert_eq!(
                    fit_of(version, newer),
                    Ok(Fit::Known(Api::Three)),
                    "{version}"
                );
            }
        }
    }

    #[test]
    fn newer_versions_are_used_after_a_warning_with_both_versions() {
        for version in ["0.28.0", "0.100.0", "1.0.0", "1.21.0"] {
            assert_eq!(
                fit_of(version, NewerGgml::Probe),
                Ok(Fit::Newer(Api::Three)),
                "{version}"
            );
            let line = newer_line(version);
            for word in [
                version,
                env!("CARGO_PKG_VERSION"),
                KNOWN,
                "GGML_RUST_NPU_GGML=strict",
            ] {
                assert!(line.contains(word), "{line}");
            }
        }
    }

    #[test]
    fn other_versions_are_refused_with_both_versions_and_a_remedy() {
        for (version, remedy) in [
            ("0.13.1", "a newer version of the program"),
            ("0.20.9", "a newer version of the program"),
            (
                "0.28.0",
                "a newer ggml-rust-npu, or unset GGML_RUST_NPU_GGML",
            ),
            (
                "1.21.0",
                "a newer ggml-rust-npu, or unset GGML_RUST_NPU_GGML",
            ),
            ("", "cannot read"),
            ("v0.21", "cannot read"),
        ] {
            let line = fit_of(version, NewerGgml::Strict).expect_err(version);
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
