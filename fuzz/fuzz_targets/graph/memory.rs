//! The memory that the tensors of a graph are in.

use ggml_rust_npu::abi::*;
use ggml_rust_npu_fuzz::border::*;

/// Memory of tensors, on the device or on the host.
pub struct Memory {
    shared: Option<Buffer>,
    host: Vec<f32>,
    used: usize,
}

impl Memory {
    pub fn new(device: usize, bytes: usize) -> Self {
        Self {
            shared: (device == HEX).then(|| Buffer::new(HEX, bytes, true).expect("memory")),
            host: if device == RK {
                vec![f32::NAN; bytes / 4]
            } else {
                Vec::new()
            },
            used: 0,
        }
    }

    pub fn place(&mut self, tensor: Tensor, role: u32) -> Tensor {
        let at = self.used;
        let bytes = tensor.nb[3] * tensor.ne[3].unsigned_abs();
        self.used += usize::try_from(bytes).expect("small").next_multiple_of(128);
        match &self.shared {
            Some(buffer) => buffer.tensor(tensor, at, role),
            None => Tensor {
                place: NPU_PLACE_HOST,
                role,
                data: self.host[at / 4..].as_mut_ptr().cast(),
                ..tensor
            },
        }
    }

    pub fn write(&mut self, tensor: &Tensor, bytes: &[u8]) {
        match &self.shared {
            Some(buffer) => assert_eq!(buffer.set(tensor, bytes, 0), NPU_STATUS_OK),
            None => {
                let at = tensor.data.addr() - self.host.as_ptr().addr();
                bytemuck::cast_slice_mut(&mut self.host)[at..][..bytes.len()]
                    .copy_from_slice(bytes);
            }
        }
    }

    pub fn read(&self, tensor: &Tensor, count: usize) -> Vec<f32> {
        match &self.shared {
            Some(buffer) => {
                let (status, bytes) = buffer.get(tensor, 0, count * 4);
                assert_eq!(status, NPU_STATUS_OK);
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|word| f32::from_le_bytes(*word))
                    .collect()
            }
            None => {
                self.host[(tensor.data.addr() - self.host.as_ptr().addr()) / 4..][..count].to_vec()
            }
        }
    }
}
