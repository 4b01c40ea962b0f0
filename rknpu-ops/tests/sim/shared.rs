//! Machines that share a file in place of the NPU's node, as several processes do.

use std::fs::File;
use std::path::PathBuf;

use rknpu_ops::ffi::MatmulType;
use rknpu_ops::layout::Soc;
use rknpu_ops::node::{self, CALL, TURN};
use rknpu_ops::sim::{self, Options};

use crate::common::{Npu, info};

/// A file in place of a node, opened by the process that has the turn.
struct Node {
    path: PathBuf,
    file: File,
}

impl Node {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("npu-sim-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let file = (File::options().read(true).write(true))
            .create_new(true)
            .open(&path)
            .unwrap();
        let node = Self { path, file };
        assert!(node::lock(&node.file, TURN).unwrap());
        node
    }

    fn options(&self) -> Options {
        let mut options = Options::new(Soc::Rk3588);
        options.node = Some(self.path.clone());
        options
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn shape() -> rknpu_ops::ffi::MatmulInfo {
    info(MatmulType::I8_I8_I32, [2, 64, 32])
}

#[test]
fn a_call_without_the_turn_locks_the_machine_up() {
    let node = Node::new("turn");
    let npu = Npu::with(node.options());
    npu.create(shape()).unwrap();
    node::unlock(&node.file, TURN).unwrap();
    assert_eq!(npu.create(shape()).unwrap_err(), -1);
    let reason = npu.machine.locked_up().unwrap();
    assert!(reason.contains("no process has the turn"), "{reason}");
    assert!(node::lock(&node.file, TURN).unwrap());
    assert_eq!(npu.create(shape()).unwrap_err(), -1);
}

#[test]
fn a_call_while_another_process_is_in_one_locks_the_machine_up() {
    let node = Node::new("call");
    let npu = Npu::with(node.options());
    let (ctx, _) = npu.create(shape()).unwrap();
    // The call has released its lock.
    assert!(!node::is_locked(&node.file, CALL).unwrap());
    assert!(node::lock(&node.file, CALL).unwrap());
    assert!(npu.mem(ctx, 64).is_none());
    let reason = npu.machine.locked_up().unwrap();
    assert!(
        reason.contains("another process is in the library"),
        "{reason}"
    );
}

#[test]
fn machines_that_share_a_node_share_its_address_spaces() {
    const HALF: u32 = 1 << 30;
    let node = Node::new("spaces");
    let [one, other] = [0; 2].map(|_| Npu::with(node.options()));
    let [(first, _), (second, _)] = [&one, &other].map(|npu| npu.create(shape()).unwrap());
    let mem = one.mem(first, HALF).unwrap();
    assert!(other.mem(second, HALF).is_none());
    let small = other.mem(second, HALF / 2).unwrap();
    // Another address space has room.
    let mut in_third = shape();
    in_third.iommu_domain_id = 3;
    let (third, _) = other.create(in_third).unwrap();
    assert!(other.mem(third, HALF).is_some());
    assert_eq!(one.destroy_mem(first, mem), 0);
    let mem = other.mem(second, HALF).unwrap();
    assert!(one.mem(first, HALF).is_none());
    // When a process ends without freeing anything, the NPU frees everything of it.
    assert_eq!(other.destroy_mem(second, mem), 0);
    assert_eq!(other.destroy_mem(second, small), 0);
    assert!(one.mem(first, HALF).is_some());
}

#[test]
fn a_machine_that_is_gone_uses_no_memory() {
    let node = Node::new("gone");
    // The record of a machine whose process died: no process holds its lock.
    let record: Vec<u8> = (0..64 * 16)
        .flat_map(|_| u64::from(u32::MAX).to_ne_bytes())
        .collect();
    std::fs::write(&node.path, record).unwrap();
    let npu = Npu::with(node.options());
    let (ctx, _) = npu.create(shape()).unwrap();
    assert!(npu.mem(ctx, 1 << 30).is_some());
}

#[test]
fn a_node_that_cannot_be_opened_is_named() {
    let mut options = Options::new(Soc::Rk3588);
    options.node = Some("/nonexistent/npu".into());
    let text = sim::start(options).unwrap_err().to_string();
    assert!(
        text.contains("/nonexistent/npu") && text.contains("No such file"),
        "{text}"
    );
}
