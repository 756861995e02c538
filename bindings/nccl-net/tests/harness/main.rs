//! Drives the plugin's tables as NCCL does: the library is loaded, the tables are found by name, calls are polled, and
//! every byte is checked; for every version.
//!
//! | file | idea |
//! |---|---|
//! | `api` | one interface over the tables of all versions |
//! | `layout` | the structures, against NCCL's headers |
//! | `transfers` | connections and messages within a process |
//! | `ring` | ranks as threads and as processes |
//! | `failures` | unauthenticated connections, peers that die, closing in flight |
//! | `nodes` | network namespaces as nodes, with a cable per pair |
//! | `rails` | nodes with several cables, of which one is cut, or slower |
//! | `rdma` | connections with queue pairs beside the streams |
//! | `sealed` | connections that are encrypted |
//! | `relays` | nodes whose connections go through others |
//! | `first` | the plugin of the book |
//! | `again` | this program again, as another process |

mod again;
mod api;
mod failures;
mod first;
mod layout;
mod nodes;
mod rails;
mod rdma;
mod relays;
mod ring;
mod sealed;
mod transfers;
