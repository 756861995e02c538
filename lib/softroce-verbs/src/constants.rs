//! Numbers of verbs.h: enumerations as modules of constants, bit fields as types, as in ibverbs-sys.

use std::ffi::c_uint;

macro_rules! modules {
    ($($name:ident { $($constant:ident = $value:literal,)* })*) => {$(
        pub mod $name {
            pub type Type = std::ffi::c_uint;
            $(pub const $constant: Type = $value;)*
        }
    )*};
}

macro_rules! numbers {
    ($($name:ident { $($constant:ident = $value:literal,)* })*) => {$(
        pub type $name = c_uint;
        $(pub const $constant: $name = $value;)*
    )*};
}

macro_rules! bits {
    ($($name:ident { $($constant:ident = $bit:literal,)* })*) => {$(
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub c_uint);

        impl $name {
            $(pub const $constant: $name = $name(1 << $bit);)*
        }

        impl std::ops::BitOr for $name {
            type Output = $name;

            fn bitor(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
        }

        impl std::ops::BitOrAssign for $name {
            fn bitor_assign(&mut self, other: $name) {
                self.0 |= other.0;
            }
        }

        impl std::ops::BitAnd for $name {
            type Output = $name;

            fn bitand(self, other: $name) -> $name {
                $name(self.0 & other.0)
            }
        }
    )*};
}

include!("numbers.rs");
