//! Finds devices of both families.

use std::path::Path;
use std::sync::Arc;

use super::Discovery;
use crate::config::Config;
use crate::packfile::Packs;
use crate::{hexagon, rockchip};

/// Finds the devices that `config` requests or that the machine has, and the reasons why others are
/// missing.
///
/// ```
/// use ggml_rust_npu::{backend, config::Config};
///
/// let set = |name| (name == "GGML_RUST_NPU_SIM").then(|| "rk3588".to_owned());
/// let found = backend::find_devices(&Config::from_lookup(set)?);
/// let device = &found.devices[0];
/// assert_eq!((device.name(), device.is_simulated()), ("RKNPU0", true));
/// // Multiplies matrices of several shapes and types, and compares them with the reference.
/// device.self_test()?;
/// # Ok::<(), ggml_rust_npu::error::Error>(())
/// ```
#[must_use]
pub fn find_devices(config: &Config) -> Discovery {
    let mut found = rockchip::discovery::find(config);
    found.append(hexagon::discovery::find(config));
    for name in config.devices.iter().flatten() {
        found.expect(name);
    }
    if let (Some(path), false) = (&config.pack, found.devices.is_empty()) {
        let packs = open_packs(path, config.pack_full);
        (found.devices.iter()).for_each(|device| device.use_packs(Arc::clone(&packs)));
    }
    found
}

/// Opens the packs that the user named; unusable ones are left out with a log line.
fn open_packs(path: &Path, full: bool) -> Arc<Packs> {
    let (packs, failed) = Packs::open(path, full);
    for (path, error) in &failed {
        log::error!(
            "{} is not used, its weights are packed when they are loaded: {error}",
            path.display()
        );
    }
    if failed.is_empty() && packs.is_empty() {
        log::warn!(
            "GGML_RUST_NPU_PACK: there is no pack file in {}",
            path.display()
        );
    }
    Arc::new(packs)
}
