//! The settings file: results of `ggml-npu bench` on a machine, which need no variables then.
//!
//! ```text
//! # everything after a # is for people
//! min_m.rk3588 = 5              multiplications of fewer rows are the CPU's
//! min_m.rk3588.simulated = 2    the same, for the stand-in only
//! k_max_int8.rk3588 = 4096      longer rows of INT8 weights are split into segments of K
//! k_max_fp16.rk3588 = 2048      the same, of FP16 weights
//! ```
//!
//! `GGML_RUST_NPU_CONFIG` names it; otherwise it is `ggml-rust-npu.conf` in `$XDG_CONFIG_HOME` or
//! in `~/.config`, if it exists. Environment variables override it.

use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::values::MIN_M_MAX;
use crate::error::Error;
use crate::files::{open_input, quote};
use crate::rockchip::caps::{self, RkCaps};

/// Name of the file in the user's folder of settings.
const FILE: &str = "ggml-rust-npu.conf";

/// The variable that names another file.
pub(super) const VARIABLE: &str = "GGML_RUST_NPU_CONFIG";

/// Largest file that is read, in bytes: a line for each chip and comments need a few hundred.
const MAX_BYTES: u64 = 1 << 20;

/// Reason why a file of settings is not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadSettings {
    path: PathBuf,
    reason: String,
    allowed: String,
}

impl From<BadSettings> for Error {
    fn from(refusal: BadSettings) -> Self {
        Self::Config {
            variable: VARIABLE,
            value: refusal.path.display().to_string(),
            reason: refusal.reason,
            allowed: refusal.allowed,
        }
    }
}

/// A number that the file sets for a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// The fewest rows that the chip multiplies.
    MinM,
    /// The largest K of an INT8 call.
    KMaxInt8,
    /// The largest K of an FP16 call.
    KMaxFp16,
}

/// Step and least value of the largest K: a multiple of every tile.
const K_STEP: usize = 256;

impl Setting {
    /// The largest value of [`Setting::MinM`].
    pub const MOST_ROWS: usize = MIN_M_MAX;

    const ALL: [Self; 3] = [Self::MinM, Self::KMaxInt8, Self::KMaxFp16];

    /// Returns the text before the chip.
    fn word(self) -> &'static str {
        match self {
            Self::MinM => "min_m",
            Self::KMaxInt8 => "k_max_int8",
            Self::KMaxFp16 => "k_max_fp16",
        }
    }

    /// Returns the value of a text.
    ///
    /// # Errors
    /// The allowed values for the chip.
    fn value(self, caps: &RkCaps, text: &str) -> Result<usize, String> {
        let (first, last, step) = match self {
            Self::MinM => (1, Self::MOST_ROWS, 1),
            Self::KMaxInt8 => (K_STEP, caps.k_max_int8, K_STEP),
            Self::KMaxFp16 => (K_STEP, caps.k_max_fp16, K_STEP),
        };
        let value = text.parse().ok();
        let value = value
            .filter(|value: &usize| (first..=last).contains(value) && value.is_multiple_of(step));
        value.ok_or_else(|| match self {
            Self::MinM => format!("rows: {first} (all on the NPU) to {last}"),
            Self::KMaxInt8 | Self::KMaxFp16 => format!("multiples of {step} up to {last}"),
        })
    }
}

/// Content of the settings file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Setting, chip, whether it is the stand-in, and the value.
    values: Vec<(Setting, &'static str, bool, usize)>,
}

impl Settings {
    /// Returns the file of a user: the named one, or the one in the settings folder, if that folder
    /// is known.
    pub fn path(lookup: impl Fn(&'static str) -> Option<String>) -> Option<PathBuf> {
        let get = |name| lookup(name).filter(|value| !value.trim().is_empty());
        let folder = || match get("XDG_CONFIG_HOME") {
            Some(folder) => Some(PathBuf::from(folder)),
            None => get("HOME").map(|home| Path::new(&home).join(".config")),
        };
        get(VARIABLE)
            .map(PathBuf::from)
            .or_else(|| folder().map(|folder| folder.join(FILE)))
    }

    /// Reads a user's file. A missing file is an error only if it was named.
    ///
    /// # Errors
    /// The reason if it cannot be read, or the number of the first invalid line.
    pub(super) fn read(
        lookup: impl Fn(&'static str) -> Option<String>,
    ) -> Result<Self, BadSettings> {
        let Some(path) = Self::path(&lookup) else {
            return Ok(Self::default());
        };
        let is_named = lookup(VARIABLE).is_some_and(|value| !value.trim().is_empty());
        let refused = |(reason, allowed)| BadSettings {
            path: path.clone(),
            reason,
            allowed,
        };
        let mut text = String::new();
        let read = open_input(&path).and_then(|file| {
            let bytes = file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
            if bytes as u64 > MAX_BYTES {
                let reason = format!("it has more than {MAX_BYTES} bytes");
                return Err(io::Error::new(ErrorKind::FileTooLarge, reason));
            }
            Ok(())
        });
        match read {
            Ok(()) => Self::parse(&text).map_err(refused),
            Err(error) if error.kind() == ErrorKind::NotFound && !is_named => Ok(Self::default()),
            Err(error) => Err(refused((
                error.to_string(),
                "a text file that can be read".into(),
            ))),
        }
    }

    /// Reads lines.
    ///
    /// # Errors
    /// The invalid line with its mistake, and the correct forms.
    pub fn parse(text: &str) -> Result<Self, (String, String)> {
        let mut settings = Self::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                let value @ (setting, chip, simulated, _) =
                    entry(line).map_err(|(reason, allowed)| {
                        (format!("line {}: {reason}", index + 1), allowed)
                    })?;
                if settings.get(setting, chip, simulated).is_some() {
                    let key = key(setting, chip, simulated);
                    let reason = format!("line {}: {key} is there twice", index + 1);
                    return Err((reason, "one line for each chip and setting".into()));
                }
                settings.values.push(value);
            }
        }
        Ok(settings)
    }

    /// Returns a setting of a chip, or of its stand-in.
    #[must_use]
    pub fn get(&self, setting: Setting, chip: &str, simulated: bool) -> Option<usize> {
        let mut known = self.values.iter();
        known
            .find(|(known, name, stand_in, _)| {
                *known == setting && *name == chip && *stand_in == simulated
            })
            .map(|(.., value)| *value)
    }

    /// Returns a file's text with a setting of a chip replaced; all other text is unchanged.
    #[must_use]
    pub fn with(text: &str, setting: Setting, chip: &str, simulated: bool, value: usize) -> String {
        let key = key(setting, chip, simulated);
        let is_other = |line: &&str| line.split(['=', '#']).next().map(str::trim) != Some(&*key);
        let mut lines: Vec<String> = text.lines().filter(is_other).map(String::from).collect();
        lines.push(format!("{key} = {value}\n"));
        lines.join("\n")
    }
}

fn key(setting: Setting, chip: &str, simulated: bool) -> String {
    let suffix = if simulated { ".simulated" } else { "" };
    format!("{}.{chip}{suffix}", setting.word())
}

/// Returns the setting, the chip, whether it is the stand-in, and the value of a line.
fn entry(line: &str) -> Result<(Setting, &'static str, bool, usize), (String, String)> {
    let form = || {
        let forms = Setting::ALL.map(|setting| format!("{}.<chip> = <number>", setting.word()));
        format!(
            "{}, with .simulated after the chip for its stand-in",
            forms.join(", ")
        )
    };
    let (key, text) = line
        .split_once('=')
        .ok_or_else(|| (format!("{:?} has no =", quote(line)), form()))?;
    let (key, text) = (key.trim(), text.trim());
    let known = key.split_once('.').and_then(|(word, chip)| {
        let mut all = Setting::ALL.into_iter();
        Some((all.find(|setting| setting.word() == word)?, chip))
    });
    let (setting, chip) =
        known.ok_or_else(|| (format!("{:?} is no setting", quote(key)), form()))?;
    let (chip, simulated) = match chip.strip_suffix(".simulated") {
        Some(chip) => (chip, true),
        None => (chip, false),
    };
    let caps = caps::by_name(chip).ok_or_else(|| {
        let chips = caps::ALL.map(|caps| caps.soc.name()).join(", ");
        {
            let reason = format!("{:?} is no chip that has this setting", quote(chip));
            (reason, chips)
        }
    })?;
    let value = setting.value(caps, text).map_err(|allowed| {
        (
            format!("{key} is {:?}, which it cannot be", quote(text)),
            allowed,
        )
    })?;
    Ok((setting, caps.soc.name(), simulated, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chip_s_line_is_for_that_chip_and_not_for_its_stand_in() {
        let text = "# measured\n\nmin_m.rk3588 = 5 # with 4 threads\nmin_m.rk3576.simulated=2\n";
        let settings = Settings::parse(text).unwrap();
        assert_eq!(settings.get(Setting::MinM, "rk3588", false), Some(5));
        assert_eq!(settings.get(Setting::MinM, "rk3588", true), None);
        assert_eq!(settings.get(Setting::MinM, "rk3576", true), Some(2));
        assert_eq!(settings.get(Setting::MinM, "rk3566", false), None);
    }

    #[test]
    fn settings_of_a_chip_are_apart() {
        let text = "k_max_int8.rk3588 = 4096\nk_max_fp16.rk3588.simulated = 2048\nmin_m.rk3588 = 3";
        let settings = Settings::parse(text).unwrap();
        for (setting, simulated, want) in [
            (Setting::KMaxInt8, false, Some(4096)),
            (Setting::KMaxInt8, true, None),
            (Setting::KMaxFp16, true, Some(2048)),
            (Setting::MinM, false, Some(3)),
        ] {
            assert_eq!(
                settings.get(setting, "rk3588", simulated),
                want,
                "{setting:?}"
            );
        }
        let text = Settings::with(text, Setting::KMaxInt8, "rk3588", false, 2048);
        assert!(
            text.contains("min_m.rk3588 = 3") && !text.contains("4096"),
            "{text}"
        );
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, words) in [
            ("\nmin_m.rk3588", ["line 2", "no ="]),
            ("max_m.rk3588 = 5", ["max_m.rk3588", "no setting"]),
            ("min_m.rk3589 = 5", ["rk3589", "rk3588, rk3576"]),
            ("min_m.hexagon-v75 = 5", ["hexagon-v75", "rk3588"]),
            ("min_m.rk3588 = 0", ["\"0\"", "65536"]),
            ("min_m.rk3588 = 65537", ["65537", "65536"]),
            ("min_m.rk3588 = few", ["few", "rows"]),
            ("min_m.rk3588 = 1\nmin_m.rk3588 = 2", ["line 2", "twice"]),
            (
                "k_max_int8.rk3588 = 4000",
                ["4000", "multiples of 256 up to 8192"],
            ),
            ("k_max_int8.rk3576 = 8192", ["8192", "up to 4096"]),
            ("k_max_fp16.rk3588 = 0", ["\"0\"", "up to 4096"]),
        ] {
            let (reason, allowed) = Settings::parse(text).unwrap_err();
            let said = format!("{reason}: {allowed}");
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
    }

    #[test]
    fn a_new_number_takes_the_place_of_the_old_one() {
        let text = "# mine\nmin_m.rk3588 = 5 # old\nmin_m.rk3588.simulated = 9";
        let text = Settings::with(text, Setting::MinM, "rk3588", false, 7);
        assert_eq!(
            text,
            "# mine\nmin_m.rk3588.simulated = 9\nmin_m.rk3588 = 7\n"
        );
        assert_eq!(
            Settings::parse(&text)
                .unwrap()
                .get(Setting::MinM, "rk3588", false),
            Some(7)
        );
        assert_eq!(
            Settings::with("", Setting::MinM, "rk3566", true, 1),
            "min_m.rk3566.simulated = 1\n"
        );
    }

    #[test]
    fn the_file_is_the_named_one_or_the_user_s() {
        let path = |set: &'static [(&str, &str)]| {
            Settings::path(|name| {
                let found = set.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(path(&[]), None);
        assert_eq!(
            path(&[("HOME", "/h")]),
            Some("/h/.config/ggml-rust-npu.conf".into())
        );
        let both = &[("HOME", "/h"), ("XDG_CONFIG_HOME", "/x")];
        assert_eq!(path(both), Some("/x/ggml-rust-npu.conf".into()));
        assert_eq!(path(&[("HOME", "/h"), (VARIABLE, "/f")]), Some("/f".into()));
    }

    /// Reading it blocked every program at its start until another program wrote to it.
    #[test]
    fn a_fifo_as_file_of_settings_is_refused_at_once() {
        let fifo = std::env::temp_dir().join(format!("ggml-rust-npu-{}.fifo", std::process::id()));
        test_kit::make_fifo(&fifo);
        let name = fifo.display().to_string();
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            send.send(Settings::read(|asked| {
                (asked == VARIABLE).then(|| name.clone())
            }))
        });
        let read = receive.recv_timeout(std::time::Duration::from_secs(60));
        let text = Error::from(read.expect("it hangs").unwrap_err()).to_string();
        std::fs::remove_file(&fifo).unwrap();
        assert!(text.contains("regular file"), "{text}");
    }

    /// Regression: the file's lines up to the limit were read as if they were the whole file, and
    /// the last one could be cut in half.
    #[test]
    fn a_file_that_is_too_large_is_refused() {
        let path = std::env::temp_dir().join(format!("ggml-rust-npu-{}.large", std::process::id()));
        let name = path.display().to_string();
        let read = |bytes: u64| {
            std::fs::write(&path, "#".repeat(bytes.try_into().unwrap())).unwrap();
            Settings::read(|asked| (asked == VARIABLE).then(|| name.clone()))
        };
        assert_eq!(read(MAX_BYTES).unwrap(), Settings::default());
        let text = Error::from(read(MAX_BYTES + 1).unwrap_err()).to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(text.contains("more than 1048576 bytes"), "{text}");
    }

    #[test]
    fn a_named_file_must_be_there_and_another_one_need_not() {
        let nowhere = "/nowhere/at/all";
        let named = Settings::read(|name| (name == VARIABLE).then(|| nowhere.into()));
        let text = Error::from(named.unwrap_err()).to_string();
        assert!(text.contains(VARIABLE) && text.contains(nowhere), "{text}");
        let home = Settings::read(|name| (name == "HOME").then(|| nowhere.into()));
        assert_eq!(home.unwrap(), Settings::default());
    }
}
