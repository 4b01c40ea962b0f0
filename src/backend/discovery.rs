//! The devices that were found, and the reasons why others were not.

use std::fmt;
use std::sync::Arc;

use super::Device;
use crate::error::{Error, Result};

/// The reason why a device is absent.
#[derive(Debug)]
pub enum Absence {
    /// Nothing on this machine indicates such an NPU; the text gives details.
    NotThere(String),
    /// `GGML_RUST_NPU_DEVICES` does not name it.
    NotChosen,
    /// The machine indicates an NPU that cannot be used; the text gives the reason.
    Unusable(String),
    /// The device could not be started.
    Failed(Error),
}

/// A device that is absent.
#[derive(Debug)]
pub struct Absent {
    /// The device's name in ggml.
    pub name: String,
    /// The reason.
    pub reason: Absence,
}

/// The result of a search for devices.
#[derive(Debug, Default)]
pub struct Discovery {
    /// The devices, tested and ready.
    pub devices: Vec<Arc<dyn Device>>,
    /// The devices that could have been there.
    pub absent: Vec<Absent>,
}

impl Absent {
    /// Returns a device that the user leaves out.
    #[must_use]
    pub fn not_chosen(name: &str) -> Self {
        Self {
            name: name.into(),
            reason: Absence::NotChosen,
        }
    }
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = &self.name;
        match &self.reason {
            Absence::NotThere(text) | Absence::Unusable(text) => f.write_str(text),
            Absence::NotChosen => {
                write!(
                    f,
                    "{name} is left out: GGML_RUST_NPU_DEVICES does not name it"
                )
            }
            Absence::Failed(error) => write!(f, "{name} is not available: {error}"),
        }
    }
}

impl Discovery {
    /// Adds a device, or the error that kept it from starting.
    pub fn add(&mut self, name: &str, device: Result<Arc<dyn Device>>) {
        match device {
            Ok(device) => self.devices.push(device),
            Err(error) => self.leave_out(name, Absence::Failed(error)),
        }
    }

    /// Adds the reason why a device is absent.
    pub fn leave_out(&mut self, name: &str, reason: Absence) {
        self.absent.push(Absent {
            name: name.into(),
            reason,
        });
    }

    /// Reports a device that the user named and that does not exist as loudly as one that cannot be
    /// used.
    pub fn expect(&mut self, name: &str) {
        let is_it = |other: &str| other.eq_ignore_ascii_case(name);
        if self.devices.iter().any(|device| is_it(device.name())) {
            return;
        }
        let mut absent = self.absent.iter_mut();
        match absent.find(|absent| is_it(&absent.name)) {
            Some(absent) => {
                if let Absence::NotThere(text) = &absent.reason {
                    absent.reason = Absence::Unusable(format!(
                        "GGML_RUST_NPU_DEVICES names {name}, which is not there: {text}"
                    ));
                }
            }
            None => self.leave_out(
                name,
                Absence::Unusable(format!(
                    "GGML_RUST_NPU_DEVICES names {name}, but no device has this name"
                )),
            ),
        }
    }

    /// Adds the results of another search.
    pub fn append(&mut self, other: Self) {
        self.devices.extend(other.devices);
        self.absent.extend(other.absent);
    }

    /// Logs the devices, and the reasons for absent ones as loudly as each deserves.
    pub fn log(&self) {
        for device in &self.devices {
            log::info!("{}: {}", device.name(), device.description());
        }
        for absent in &self.absent {
            let level = match absent.reason {
                Absence::NotThere(_) => log::Level::Debug,
                Absence::NotChosen => log::Level::Info,
                Absence::Unusable(_) => log::Level::Warn,
                Absence::Failed(_) => log::Level::Error,
            };
            log::log!(level, "{absent}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_the_user_names_is_not_missed_in_silence() {
        let mut found = Discovery::default();
        found.leave_out("RKNPU0", Absence::NotThere("no Rockchip NPU".to_owned()));
        found.leave_out("HEX0", Absence::Unusable("no library".to_owned()));
        for name in ["rknpu0", "HEX0", "HEX9"] {
            found.expect(name);
        }
        let texts: Vec<String> = (found.absent.iter())
            .map(|absent| {
                assert!(matches!(absent.reason, Absence::Unusable(_)), "{absent}");
                absent.to_string()
            })
            .collect();
        assert_eq!(
            texts,
            [
                "GGML_RUST_NPU_DEVICES names rknpu0, which is not there: no Rockchip NPU",
                "no library",
                "GGML_RUST_NPU_DEVICES names HEX9, but no device has this name",
            ]
        );
    }
}
