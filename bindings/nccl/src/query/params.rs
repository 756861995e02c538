//! `ncclParam*` of NCCL 2.30: the settings by name, those of NCCL that mean something here and all of this library's.
//!
//! A value is a whole number where it reads as one (K, M and G may follow), else a text.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::sync::OnceLock;

use tinynccl::Config;

use crate::abi::ParamHandle;
use crate::abi::error::{Error, Result};
use crate::abi::export::{export, export_value, out};
use crate::env::{settings, variables, version};

/// All names, in the order in which they are listed; a handle points to one of them.
fn names() -> &'static [CString] {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let theirs = settings::HONOURED.iter().map(|setting| setting.name).chain(["TINYNCCL_NCCL_VERSION"]);
        let ours = Config::describe();
        theirs.chain(ours.iter().map(|setting| setting.env)).filter_map(|name| CString::new(name).ok()).collect()
    })
}

fn find(name: &CStr) -> Result<&'static CString> {
    let found = names().iter().find(|known| known.as_c_str() == name);
    found.ok_or_else(|| {
        Error::argument(format!(
            "there is no parameter {}: ncclParamGetAllParameterKeys lists those that there are",
            name.to_string_lossy()
        ))
    })
}

/// The value now, as its variable would spell it. One of NCCL's that is not set is empty: what it would change has a
/// name of this library, too.
///
/// # Errors
/// Those of a variable that does not parse.
fn value(name: &str) -> Result<String> {
    if name == "TINYNCCL_NCCL_VERSION" {
        return Ok(version::version().to_string());
    }
    if settings::HONOURED.iter().any(|setting| setting.name == name) {
        return Ok(variables::get(name).unwrap_or_default());
    }
    let all = settings::config()?.values();
    let found = all.into_iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| value).ok_or_else(|| Error::internal(format!("{name} is listed and has no value")))
}

/// A whole number, if the text is one.
fn number(text: &str) -> Option<i128> {
    let text = text.trim();
    let shift = match text.bytes().last() {
        Some(b'k' | b'K') => 10,
        Some(b'm' | b'M') => 20,
        Some(b'g' | b'G') => 30,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    digits.parse::<i64>().ok().map(|number| i128::from(number) << shift)
}

/// The bytes of a value: a number as 8 in memory order, a text with a zero behind it.
fn bytes(value: &str) -> Vec<u8> {
    match number(value).and_then(|number| i64::try_from(number).ok()) {
        Some(number) => number.to_ne_bytes().to_vec(),
        None => [value.as_bytes(), &[0]].concat(),
    }
}

/// The name that a handle points to.
fn bound(handle: *const ParamHandle) -> Result<&'static str> {
    let found = names().iter().find(|name| std::ptr::eq(*name, handle.cast::<CString>()));
    let name = found
        .ok_or_else(|| Error::argument(format!("the handle is {handle:p}, expected one that ncclParamBind gave")))?;
    name.to_str().map_err(|_| Error::internal("a name that is not UTF-8"))
}

fn integer<T: TryFrom<i128>>(handle: *const ParamHandle, to: *mut T) -> Result<()> {
    // SAFETY: NULL or the caller's variable.
    let to = unsafe { out("out", to) }?;
    let name = bound(handle)?;
    let value = value(name)?;
    let read = number(&value).and_then(|number| T::try_from(number).ok());
    *to = read.ok_or_else(|| {
        let expected = std::any::type_name::<T>();
        Error::argument(format!("{name} is {value:?}, expected a whole number that fits into {expected}"))
    })?;
    Ok(())
}

thread_local! {
    /// Texts that `ncclParamGetStr` and `ncclParamGetParameter` returned last to this thread.
    static GIVEN: RefCell<[CString; 2]> = RefCell::default();
}

/// Keeps a text in slot `which`; its address is valid until this thread's next one there.
fn give(which: usize, text: String) -> Result<(*const c_char, c_int)> {
    let text = CString::new(text).map_err(|_| Error::internal("a value with a zero byte"))?;
    GIVEN.with_borrow_mut(|given| {
        given[which] = text;
        Ok((given[which].as_ptr(), given[which].count_bytes() as c_int))
    })
}

/// # Safety
/// `key` is NULL or a string that ends with a zero.
unsafe fn key<'a>(key: *const c_char) -> Result<&'a CStr> {
    if key.is_null() {
        return Err(Error::argument("key is NULL"));
    }
    // SAFETY: forwarded from the caller.
    Ok(unsafe { CStr::from_ptr(key) })
}

macro_rules! integers {
    ($($(#[$doc:meta])* $name:ident / $twin:ident: $ty:ty;)*) => {
        export! {$(
            $(#[$doc])*
            fn $name / $twin [] (handle: *const ParamHandle, to: *mut $ty) { integer(handle, to) }
        )*}
    };
}

integers! {
    /// Reads a whole number that fits.
    ncclParamGetI8 / pncclParamGetI8: i8;
    /// Reads a whole number that fits.
    ncclParamGetI16 / pncclParamGetI16: i16;
    /// Reads a whole number that fits.
    ncclParamGetI32 / pncclParamGetI32: i32;
    /// Reads a whole number that fits.
    ncclParamGetI64 / pncclParamGetI64: i64;
    /// Reads a whole number that fits.
    ncclParamGetU8 / pncclParamGetU8: u8;
    /// Reads a whole number that fits.
    ncclParamGetU16 / pncclParamGetU16: u16;
    /// Reads a whole number that fits.
    ncclParamGetU32 / pncclParamGetU32: u32;
    /// Reads a whole number that fits.
    ncclParamGetU64 / pncclParamGetU64: u64;
}

export! {
    /// Writes a handle of the parameter `name`, valid forever.
    fn ncclParamBind / pncclParamBind [] (to: *mut *const ParamHandle, name: *const c_char) {
        // SAFETY: NULL or the caller's variable, here and below.
        let to = unsafe { out("out", to) }?;
        // SAFETY: NULL or the caller's string, here and below.
        *to = (&raw const *find(unsafe { key(name) }?)?).cast();
        Ok(())
    }

    /// Reads the value as a text, valid until this thread's next call.
    fn ncclParamGetStr / pncclParamGetStr [] (handle: *const ParamHandle, to: *mut *const c_char) {
        // SAFETY: see above.
        let to = unsafe { out("out", to) }?;
        (*to, _) = give(0, value(bound(handle)?)?)?;
        Ok(())
    }

    /// Copies the value's bytes to `to`, a buffer of `room` bytes: a number is 8 bytes, a text ends with a zero.
    /// `*length`, unless it is NULL, gets the number of bytes, also if the buffer is too small.
    fn ncclParamGet / pncclParamGet [] (handle: *const ParamHandle, to: *mut c_void, room: c_int, length: *mut c_int) {
        let name = bound(handle)?;
        let bytes = bytes(&value(name)?);
        // SAFETY: see above.
        if let Some(length) = unsafe { length.as_mut() } {
            *length = bytes.len() as c_int;
        }
        if to.is_null() || usize::try_from(room).is_ok_and(|room| room < bytes.len()) || room < 0 {
            return Err(Error::argument(format!(
                "out is {to:p} with room for {room} bytes, expected {} for {name}", bytes.len()
            )));
        }
        // SAFETY: the caller's memory of `room` bytes.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Reads the value of the parameter `name` as a text, valid until this thread's next call, and its length.
    fn ncclParamGetParameter / pncclParamGetParameter [] (
        name: *const c_char, to: *mut *const c_char, length: *mut c_int
    ) {
        // SAFETY: see above.
        let (to, length) = unsafe { (out("value", to)?, out("valueLen", length)?) };
        (*to, *length) = (std::ptr::null(), 0);
        // SAFETY: see above.
        let name = find(unsafe { key(name) }?)?;
        (*to, *length) = give(1, value(&name.to_string_lossy())?)?;
        Ok(())
    }

    /// Writes the address of all names, and their number.
    fn ncclParamGetAllParameterKeys / pncclParamGetAllParameterKeys [] (
        table: *mut *const *const c_char, length: *mut c_int
    ) {
        struct Table(Vec<*const c_char>);
        // SAFETY: addresses of strings that are never changed nor freed.
        unsafe impl Send for Table {}
        // SAFETY: as above.
        unsafe impl Sync for Table {}
        static TABLE: OnceLock<Table> = OnceLock::new();
        // SAFETY: see above.
        let (table, length) = unsafe { (out("table", table)?, out("tableLen", length)?) };
        let all = TABLE.get_or_init(|| Table(names().iter().map(|name| name.as_ptr()).collect()));
        (*table, *length) = (all.0.as_ptr(), all.0.len() as c_int);
        Ok(())
    }
}

export_value! {
    /// Prints all names and values to the standard output, as NCCL does.
    fn ncclParamDumpAll / pncclParamDumpAll () -> (), (); {
        let mut text = String::new();
        for name in names() {
            let name = name.to_string_lossy();
            let value = value(&name).unwrap_or_else(|error| format!("({})", error.text));
            text.push_str(&format!("{name}={value}\n"));
        }
        if let Err(error) = std::io::stdout().write_all(text.as_bytes()) {
            log::warn!("ncclParamDumpAll: writing to the standard output: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_each_type_that_holds_them() {
        for (text, expected) in [("0", Some(0)), ("-3", Some(-3)), ("128K", Some(128 << 10)), ("2M", Some(2 << 20))] {
            assert_eq!(number(text), expected, "{text}");
        }
        for text in ["", "auto", "2.5", "K", "1 2", "0x10"] {
            assert_eq!(number(text), None, "{text}");
        }
        assert_eq!(bytes("128K"), (128i64 << 10).to_ne_bytes());
        assert_eq!(bytes("auto"), b"auto\0");
    }

    #[test]
    fn handles_are_names() {
        let name = find(c"TINYNCCL_FIFO_DEPTH").unwrap();
        let handle = (&raw const *name).cast::<ParamHandle>();
        assert_eq!(bound(handle).unwrap(), "TINYNCCL_FIFO_DEPTH");
        let (mut wide, mut narrow) = (0i64, 0u8);
        integer(handle, &raw mut wide).unwrap();
        integer(handle, &raw mut narrow).unwrap();
        assert!(wide >= 2 && wide == i64::from(narrow));
        assert!(bound(handle.wrapping_byte_add(1)).is_err() && bound(std::ptr::null()).is_err());
        assert!(integer(handle, std::ptr::null_mut::<i32>()).is_err());
        let text = find(c"TINYNCCL_TRANSPORT").unwrap();
        let error = integer((&raw const *text).cast(), &raw mut wide).unwrap_err();
        assert!(error.text.contains("expected a whole number that fits into i64"), "{}", error.text);
        assert!(find(c"NCCL_NOTHING").unwrap_err().text.contains("NCCL_NOTHING"));
    }

    #[test]
    fn every_name_has_a_value_and_appears_once() {
        let mut seen = std::collections::HashSet::new();
        for name in names() {
            let name = name.to_str().unwrap();
            assert!(seen.insert(name), "{name} twice");
            value(name).unwrap();
        }
        assert!(seen.contains("NCCL_DEBUG") && seen.contains("TINYNCCL_TIMEOUT"));
    }
}
