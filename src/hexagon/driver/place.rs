//! Places of the vendor's library, of its devices and of our libraries for the DSP.
#![expect(
    unsafe_code,
    reason = "asks the loader for an address, and sets a variable"
)]

use std::ffi::{OsStr, c_void};
use std::path::{Path, PathBuf};

use hexagon_ops::ffi::Domain;

/// Names of the vendor's library, in the order in which they are tried.
///
/// SOURCE: Debian's libfastrpc1 1.0.8-1 installs `libcdsprpc.so.1`, and the plain name with the
/// development files; Android has the library where programs of the shell do not look.
pub(super) const LIBRARIES: &[&str] = &[
    "libcdsprpc.so",
    "libcdsprpc.so.1",
    #[cfg(target_os = "android")]
    "/vendor/lib64/libcdsprpc.so",
];

/// Returns the first of FastRPC's devices in `folder` (`/dev`), which shows that there is a DSP.
#[must_use]
pub fn device_node(folder: &Path) -> Option<PathBuf> {
    let names = std::fs::read_dir(folder).ok()?.flatten();
    let is_node = |name: &OsStr| {
        let name = name.as_encoded_bytes();
        name.starts_with(b"fastrpc-cdsp") || name.starts_with(b"adsprpc-smd")
    };
    let nodes = names.filter(|entry| is_node(&entry.file_name()));
    nodes.map(|entry| entry.path()).min()
}

/// Returns `true` if the folder `/dev` has a node of a DSP, of either kind.
pub fn has_node_of(folder: &Path, dsp: Domain) -> bool {
    let name = dsp.name().to_string_lossy();
    ["", "-secure"]
        .iter()
        .any(|kind| folder.join(format!("fastrpc-{name}{kind}")).exists())
}

/// Sets the folder of this library or program as one in which FastRPC looks for libraries for the
/// DSP, if there are some and no variable names a folder. FastRPC adds the folders of the system.
///
/// SOURCE: qualcomm/fastrpc src/apps_std_imp.c (`get_dirlist_from_env`).
pub fn offer_own_folder() {
    let is_set = |name| std::env::var_os(name).is_some();
    if is_set("DSP_LIBRARY_PATH") || is_set("ADSP_LIBRARY_PATH") {
        return;
    }
    if let Some(folder) = own_folder().filter(|folder| has_dsp_library(folder)) {
        log::debug!("DSP_LIBRARY_PATH={}", folder.display());
        // SAFETY: devices are discovered once, when the backend is registered, and only on machines
        // with FastRPC. Most programs have a single thread by then; other threads may use the
        // environment only through std, which locks it. This is not checked. A program that sets
        // the variable itself avoids this call.
        unsafe { std::env::set_var("DSP_LIBRARY_PATH", folder) };
    }
}

/// Returns the folder of the file that this code was loaded from.
fn own_folder() -> Option<PathBuf> {
    let name = os::libraries::file_of(own_folder as *const c_void)?;
    let path = file_called(&name)?;
    path.parent().map(Path::to_path_buf)
}

/// Returns the file that the loader calls `name`, without links.
///
/// A program is called by the word that started it, which a shell may have found in `PATH`.
fn file_called(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        std::fs::canonicalize(name).ok()
    } else {
        std::env::current_exe().ok()
    }
}

fn has_dsp_library(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    (entries.map(|entry| entry.file_name())).any(|name| {
        name.as_encoded_bytes()
            .starts_with(b"libggml_rust_npu_skel_v")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a new folder for a test.
    fn folder(name: &str) -> PathBuf {
        let name = format!("ggml-rust-npu-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_dsp_is_seen_by_its_device() {
        let folder = folder("nodes");
        assert_eq!(device_node(&folder), None);
        for name in ["null", "fastrpc-adsp", "fastrpc-cdsp1", "fastrpc-cdsp"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        let node = device_node(&folder).unwrap();
        assert_eq!(node.file_name().unwrap(), "fastrpc-cdsp");
        assert_eq!(device_node(&folder.join("none")), None);
        std::fs::write(folder.join("fastrpc-cdsp2-secure"), "").unwrap();
        let seen = Domain::ALL.map(|dsp| has_node_of(&folder, dsp));
        assert_eq!(seen, [true, true, true, false]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// Regression: a tool that was started by its name alone looked for the DSP's libraries in the
    /// current folder.
    #[test]
    fn a_program_found_in_path_is_known() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(file_called(Path::new("ggml-npu")), Some(own));
        assert_eq!(file_called(Path::new("/bin/../bin/none")), None);
    }

    #[test]
    fn a_folder_with_a_dsp_library_is_known() {
        let folder = folder("library");
        assert!(!has_dsp_library(&folder));
        std::fs::write(folder.join("libggml_rust_npu_skel_v75.so"), "").unwrap();
        assert!(has_dsp_library(&folder));
        std::fs::remove_dir_all(folder).unwrap();
        let own = own_folder().unwrap();
        assert_eq!(own, std::env::current_exe().unwrap().parent().unwrap());
    }
}
