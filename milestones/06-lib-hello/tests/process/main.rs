//! The real program, and the contract of a link over the one in `src/link.rs`: the library's own suite, as it runs over
//! its transports.

#[macro_use]
#[path = "../../../../lib/tests/conformance/suite.rs"]
mod suite;

#[path = "../../../../lib/tests/conformance/basics.rs"]
mod basics;
#[path = "../../../../lib/tests/conformance/credits.rs"]
mod credits;
#[path = "../../../../lib/tests/conformance/death.rs"]
mod death;
mod harness;
#[path = "../../../../lib/tests/conformance/loops.rs"]
mod loops;
mod program;
#[path = "../../../../lib/tests/conformance/random.rs"]
mod random;
#[path = "../../../../lib/tests/conformance/sleeping.rs"]
mod sleeping;

use harness::Backend;

suite! {
    own_link: Backend::Own;
}
