//! The environment variables, read once. An unknown value is an error that names the allowed ones.

use std::ffi::OsString;

use rknpu_ops::sim::Fault;

use self::settings::{BadSettings, Setting, Settings};
use crate::error::{Error, Result};
use crate::hexagon::caps::HexCaps;
use crate::rockchip::caps::{self, RkCaps};

pub mod rules;
pub mod settings;
mod values;
pub mod variables;

pub use self::variables::Config;
pub use values::{calibration, calibration_word, calibrations};

/// Prefix of every variable.
const PREFIX: &str = "GGML_RUST_NPU_";

/// A chip that a stand-in can be.
#[derive(Clone, Copy, Debug)]
pub enum SimChip {
    /// A Rockchip NPU.
    Rockchip(&'static RkCaps),
    /// A Hexagon NPU.
    Hexagon(&'static HexCaps),
}

/// Bits of activations in products of one or two rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationBits {
    /// 8 bits, with one scale for each 32.
    Eight,
    /// 16 bits: 8 bits, and 8 bits for the remainder, or FP16.
    Sixteen,
    /// 16 bits where that is not slower.
    Auto,
}

/// The driver of a Rockchip NPU in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Driving {
    /// The vendor's library.
    #[default]
    Vendor,
    /// Our own command streams, over the kernel's driver.
    Direct,
    /// The vendor's library, or command streams if none can be loaded.
    Auto,
}

/// When weights of a Hexagon device are packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repack {
    /// When they are written to a buffer that ggml calls one of weights.
    #[default]
    Weights,
    /// When any tensor is written that could be a weight: has upstream's tests go through packed
    /// memory.
    Always,
    /// At each use.
    Off,
}

/// Faults for both stand-ins: one variable serves them, and function names distinguish them.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Faults of librknnrt.
    pub rknn: Vec<Fault>,
    /// Faults of libcdsprpc and of its DSP.
    pub fastrpc: Vec<hexagon_ops::sim::Fault>,
}

impl Config {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// `Config` for the first variable that is not understood, or not UTF-8.
    pub fn from_env() -> Result<Self> {
        Self::from_os_lookup(std::env::var_os)
    }

    /// Reads variables through `lookup`, whose values may be any bytes.
    ///
    /// # Errors
    /// As [`Self::from_env`].
    pub fn from_os_lookup(lookup: impl Fn(&'static str) -> Option<OsString>) -> Result<Self> {
        for variable in variables::names() {
            let value = lookup(variable);
            if let Some(value) = value.filter(|value| value.to_str().is_none()) {
                return Err(Error::Config {
                    variable,
                    value: value.to_string_lossy().into_owned(),
                    reason: "not UTF-8".into(),
                    allowed: "text in UTF-8".into(),
                });
            }
        }
        // The other variables, such as HOME, only lead to optional files, so a value that is not
        // UTF-8 counts as unset.
        Self::from_lookup(|name| lookup(name)?.into_string().ok())
    }

    /// Reads variables through `lookup`; an empty value is the same as none.
    ///
    /// ```
    /// use ggml_rust_npu::config::Config;
    ///
    /// let set = |name| (name == "GGML_RUST_NPU_TIMEOUT").then(|| "5".to_owned());
    /// assert_eq!(Config::from_lookup(set)?.timeout.as_secs(), 5);
    ///
    /// let misspelt = |name| (name == "GGML_RUST_NPU_SIM").then(|| "rk3599".to_owned());
    /// let error = Config::from_lookup(misspelt).expect_err("there is no such chip");
    /// assert!(error.to_string().contains("rk3588"), "the error names the allowed values");
    /// # Ok::<(), ggml_rust_npu::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Config` for the first variable with an invalid value.
    pub fn from_lookup(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Self> {
        let get = |name| lookup(name).filter(|value| !value.trim().is_empty());
        let config = Self::parse(get, Settings::read(&lookup))?;
        if let (Some(rows @ 2..), Some(false)) = (config.min_m, config.keep) {
            return Err(Error::Config {
                variable: "GGML_RUST_NPU_KEEP",
                value: "off".into(),
                reason: format!("the CPU reads what is kept, and GGML_RUST_NPU_MIN_M={rows}"),
                allowed: "on, or GGML_RUST_NPU_MIN_M=1".into(),
            });
        }
        Ok(config)
    }
}

impl Config {
    /// Returns `true` if the user wants the device with this name in ggml.
    #[must_use]
    pub fn chooses(&self, device: &str) -> bool {
        let chosen = self.devices.as_ref();
        chosen.is_none_or(|chosen| chosen.iter().any(|name| name.eq_ignore_ascii_case(device)))
    }

    /// Returns the memory of the machine that simulated devices are in, if it is not this one's.
    #[must_use]
    pub fn sim_memory_bytes(&self) -> Option<usize> {
        let mib = self.sim_memory_mib.filter(|_| !self.sim.is_empty())?;
        usize::try_from(u64::from(mib) << 20).ok()
    }

    /// Returns a chip's value in the settings file.
    ///
    /// # Errors
    /// `Config` if the settings file is invalid.
    pub fn setting(&self, setting: Setting, chip: &str) -> Result<Option<usize>> {
        let settings = self.settings.as_ref().map_err(BadSettings::clone)?;
        Ok(settings.get(setting, chip, !self.sim.is_empty()))
    }

    /// Returns the fewest rows that a chip multiplies, from the environment, the settings file, or
    /// [`caps::MIN_M`].
    ///
    /// # Errors
    /// `Config` if the settings file is needed and invalid.
    pub fn min_m(&self, chip: &str) -> Result<usize> {
        if let Some(rows) = self.min_m {
            return Ok(rows);
        }
        let rows = self.setting(Setting::MinM, chip)?;
        Ok(match rows {
            Some(rows @ 2..) if self.keep == Some(false) => {
                log::warn!(
                    "min_m.{chip} = {rows} has no effect: GGML_RUST_NPU_KEEP=off, and the CPU reads what is kept"
                );
                caps::MIN_M
            }
            rows => rows.unwrap_or(caps::MIN_M),
        })
    }

    /// Returns the fewest rows that a chip multiplies with weights that packing makes larger:
    /// [`caps::MIN_M_NARROW`], unless the user sets the fewest rows of the chip, or that no bytes
    /// are kept. A simulated chip multiplies any number of rows, because its speed is unrelated to
    /// a device's.
    ///
    /// # Errors
    /// As [`Config::min_m`].
    pub fn min_m_narrow(&self, chip: &str) -> Result<usize> {
        let is_simulated = !self.sim.is_empty();
        let settings = self.settings.as_ref().map_err(BadSettings::clone);
        let is_said = match self.min_m {
            Some(_) => true,
            None => settings?.get(Setting::MinM, chip, is_simulated).is_some(),
        };
        if is_said || is_simulated || self.keep == Some(false) {
            return self.min_m(chip);
        }
        Ok(caps::MIN_M_NARROW)
    }
}

/// Returns the names in the environment that look like ours and are not: typing errors that would
/// go unnoticed.
#[must_use]
pub fn unknown_variables(names: impl Iterator<Item = String>) -> Vec<String> {
    names
        .filter(|name| name.starts_with(PREFIX) && !variables::names().any(|known| known == name))
        .collect()
}

/// Returns the variables' names, for messages.
#[must_use]
pub fn known_variables() -> String {
    variables::names().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use log::LevelFilter;

    use super::*;

    fn with(variable: &'static str, value: &'static str) -> Result<Config> {
        Config::from_lookup(|name| (name == variable).then(|| value.into()))
    }

    #[test]
    fn nothing_set_means_no_simulated_device() {
        let config = Config::from_lookup(|_| None).unwrap();
        assert!(config.sim.is_empty() && config.chip.is_none() && config.devices.is_none());
        assert_eq!(config.log, LevelFilter::Info);
    }

    #[test]
    fn a_wrong_value_names_the_variable_the_value_and_the_allowed_ones() {
        for (variable, value, allowed) in [
            ("GGML_RUST_NPU_SIM", "rk3589", "rk3588"),
            ("GGML_RUST_NPU_CHIP", "RK", "rk3576"),
            ("GGML_RUST_NPU_LOG", "loud", "debug"),
            (
                "GGML_RUST_NPU_RULES",
                "ffn=int3",
                "fp16, int8, int8-plain, int8-wide, int4, int4-fp16, cpu",
            ),
            ("GGML_RUST_NPU_CALIBRATION", "best", "absmax"),
            ("GGML_RUST_NPU_KEEP", "no", "on, off"),
            ("GGML_RUST_NPU_CORES", "0;1", "0,1"),
            ("GGML_RUST_NPU_PACK_VERIFY", "yes", "sampled, full"),
            ("GGML_RUST_NPU_MIN_M", "0", "1 (all on the NPU)"),
            ("GGML_RUST_NPU_MIN_M", "two", "65536"),
            ("GGML_RUST_NPU_SIM_COHERENCE", "loose", "strict"),
            (
                "GGML_RUST_NPU_SIM_FAULTS",
                "rknn_matmul_jump:1=-1",
                "function:n=code",
            ),
        ] {
            let text = with(variable, value).unwrap_err().to_string();
            assert!(
                text.contains(variable) && text.contains(value) && text.contains(allowed),
                "{text}"
            );
        }
    }

    #[test]
    fn what_the_cpu_shall_read_must_be_kept() {
        let both = |name: &str| match name {
            "GGML_RUST_NPU_KEEP" => Some("off".into()),
            "GGML_RUST_NPU_MIN_M" => Some("4".into()),
            _ => None,
        };
        let text = Config::from_lookup(both).unwrap_err().to_string();
        assert!(text.contains("KEEP") && text.contains("MIN_M=4"), "{text}");
        let keep = |value| with("GGML_RUST_NPU_KEEP", value).unwrap().keep;
        assert_eq!(
            (keep("off"), keep("on"), keep("")),
            (Some(false), Some(true), None)
        );
    }

    #[test]
    fn few_rows_with_narrow_weights_are_the_cpu_s_unless_the_user_or_a_simulation_says_otherwise() {
        let narrow = |set: &'static [(&str, &str)]| {
            let value = |name| set.iter().find(|(known, _)| *known == name);
            let config = Config::from_lookup(|name| value(name).map(|(_, value)| (*value).into()));
            let config = config.unwrap();
            (
                config.min_m("rk3588").unwrap(),
                config.min_m_narrow("rk3588").unwrap(),
            )
        };
        assert_eq!(narrow(&[]), (1, 32));
        assert_eq!(narrow(&[("GGML_RUST_NPU_KEEP", "on")]), (1, 32));
        assert_eq!(narrow(&[("GGML_RUST_NPU_KEEP", "off")]), (1, 1));
        assert_eq!(narrow(&[("GGML_RUST_NPU_MIN_M", "1")]), (1, 1));
        assert_eq!(narrow(&[("GGML_RUST_NPU_MIN_M", "4")]), (4, 4));
        assert_eq!(narrow(&[("GGML_RUST_NPU_SIM", "rk3588")]), (1, 1));
    }

    #[test]
    fn the_environment_is_stronger_than_the_file() {
        let path = std::env::temp_dir().join(format!("ggml-rust-npu-{}.conf", std::process::id()));
        std::fs::write(&path, "min_m.rk3588 = 5\nmin_m.rk3588.simulated = 3\n").unwrap();
        let with = |set: &'static [(&str, &str)]| {
            let value = |name| set.iter().find(|(known, _)| *known == name);
            let file = |name| (name == settings::VARIABLE).then(|| path.display().to_string());
            let config = Config::from_lookup(|name| {
                value(name)
                    .map(|(_, value)| (*value).to_owned())
                    .or_else(|| file(name))
            });
            config.unwrap().min_m("rk3588").unwrap()
        };
        assert_eq!(with(&[]), 5);
        assert_eq!(with(&[("GGML_RUST_NPU_SIM", "rk3588")]), 3);
        assert_eq!(with(&[("GGML_RUST_NPU_MIN_M", "1")]), 1);
        assert_eq!(with(&[("GGML_RUST_NPU_KEEP", "off")]), 1);
        std::fs::remove_file(&path).unwrap();
    }

    /// Regression: only Rockchip devices have settings, but a typing error in the file also
    /// disabled Hexagon devices.
    #[test]
    fn a_wrong_file_of_settings_is_an_error_only_for_what_needs_it() {
        let path = std::env::temp_dir().join(format!("ggml-rust-npu-{}.bad", std::process::id()));
        std::fs::write(&path, "min_n.rk3588 = 5\n").unwrap();
        let with = |min_m: Option<&'static str>| {
            let config = Config::from_lookup(|name| match name {
                settings::VARIABLE => Some(path.display().to_string()),
                "GGML_RUST_NPU_MIN_M" => min_m.map(String::from),
                _ => None,
            });
            config.unwrap().min_m("rk3588")
        };
        let text = with(None).unwrap_err().to_string();
        assert!(
            text.contains("line 1") && text.contains("min_n.rk3588"),
            "{text}"
        );
        assert_eq!(with(Some("4")).unwrap(), 4);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_variable_that_is_not_utf_8_is_an_error_with_its_name() {
        use std::os::unix::ffi::OsStringExt;
        for variable in variables::names() {
            let lookup =
                |name| (name == variable).then(|| OsString::from_vec(b"rk\xff3588".into()));
            let text = Config::from_os_lookup(lookup).unwrap_err().to_string();
            assert!(text.contains(variable) && text.contains("UTF-8"), "{text}");
        }
        let home = |name| (name == "HOME").then(|| OsString::from_vec(b"/h\xff".into()));
        assert!(
            Config::from_os_lookup(home).is_ok(),
            "it is no variable of ours"
        );
    }

    #[test]
    fn misspelt_variables_are_found() {
        let names = ["GGML_RUST_NPU_SIMM", "GGML_RUST_NPU_SIM", "PATH"].map(String::from);
        assert_eq!(unknown_variables(names.into_iter()), ["GGML_RUST_NPU_SIMM"]);
    }
}
