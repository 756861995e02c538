//! The structure of a plan's text. Names are those of the format.

use serde::{Deserialize, Serialize};

/// The plan. What does not change what is computed is written, and not read.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    #[serde(default)]
    pub(super) name: String,
    pub(super) collective: String,
    #[serde(default)]
    pub(super) protocol: String,
    #[serde(default)]
    pub(super) inplace: bool,
    #[serde(default)]
    pub(super) reuse_resources: bool,
    pub(super) gpus: Vec<Gpu>,
    #[serde(default)]
    pub(super) num_threads_per_block: u64,
    #[serde(default)]
    pub(super) use_double_scratch_buffer: bool,
    #[serde(default)]
    pub(super) buffer_alignment: u64,
    #[serde(default)]
    pub(super) min_message_size: u64,
    #[serde(default)]
    pub(super) max_message_size: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Gpu {
    pub(super) id: usize,
    pub(super) input_chunks: usize,
    pub(super) output_chunks: usize,
    #[serde(default)]
    pub(super) scratch_chunks: usize,
    pub(super) threadblocks: Vec<Block>,
    #[serde(default)]
    pub(super) channels: Vec<Channels>,
    #[serde(default)]
    pub(super) remote_buffers: Vec<RemoteBuffer>,
    #[serde(default)]
    pub(super) semaphores: Vec<Semaphore>,
}

/// Channels of a type: one to each rank of the list.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Channels {
    pub(super) channel_type: String,
    #[serde(default)]
    pub(super) connected_to: Vec<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RemoteBuffer {
    pub(super) rank: usize,
    #[serde(rename = "type")]
    pub(super) kind: String,
    #[serde(default)]
    pub(super) access_channel_types: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Semaphore {
    pub(super) init_value: usize,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Block {
    pub(super) id: usize,
    pub(super) ops: Vec<Op>,
    #[serde(default)]
    pub(super) channels: Vec<BlockChannels>,
    #[serde(default)]
    pub(super) remote_buffer_refs: Vec<BufferRefs>,
}

/// The rank's channels that a threadblock numbers from 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BlockChannels {
    pub(super) channel_type: String,
    pub(super) channel_ids: Vec<usize>,
}

/// The rank's remote buffers that a threadblock numbers from 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BufferRefs {
    pub(super) access_channel_type: String,
    pub(super) remote_buffer_ids: Vec<usize>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Op {
    pub(super) name: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) src_buff: Vec<Buffer>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) dst_buff: Vec<Buffer>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) channel_ids: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) channel_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) reduce_op: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) barrier_id: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) num_threadblocks: Option<usize>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) semaphore_ids: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tbg_info: Option<Group>,
    /// The steps of a `pipeline`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ops: Vec<Op>,
}

/// The share of a threadblock of a group in each of its operations.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) tb_id: usize,
    pub(super) tbg_size: usize,
}

/// Chunks of a buffer of ours (`kind`), of another rank (`buffer_id`), or of a switch.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Buffer {
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) buffer_id: Option<usize>,
    #[serde(default, skip_serializing)]
    pub(super) switch_channel_id: Option<usize>,
    pub(super) index: usize,
    pub(super) size: usize,
}
