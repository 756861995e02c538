//! RDMA over `softroce`, the RDMA device in user space, and a wire that shows its packets and breaks.
//!
//! | file | idea |
//! | --- | --- |
//! | `end` | a queue pair that is ready to use |
//! | `wire` | a box between two queue pairs |
//! | `shown` | packets as lines of text, also those of a trace |
//! | `scenes` | the requests that the book's chapter "Inside the card" shows |

pub(crate) mod end;
pub(crate) mod scenes;
pub(crate) mod shown;
pub(crate) mod wire;
