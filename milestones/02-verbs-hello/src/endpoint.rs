//! The peer's address, read from its line of text.

use verbs_kit::endpoint::{Endpoint, field};
use verbs_kit::words;

/// Reads exactly what [`Endpoint`] prints: bytes of an unauthenticated peer must not become a QP's attributes.
// EXERCISE 2 (How it works): parse the output of `Display` field by field and refuse everything else: extra
// fields, a qpn or psn of more than 24 bits, an invalid MTU.
pub(crate) fn parse(text: &str) -> Result<Endpoint, String> {
    let mut fields = text.split(' ');
    let endpoint = Endpoint {
        qpn: field(&mut fields, "qpn")?,
        psn: field(&mut fields, "psn")?,
        gid: field(&mut fields, "gid")?,
        lid: field(&mut fields, "lid")?,
        mtu: field(&mut fields, "mtu")?,
    };
    if let Some(more) = fields.next() {
        return Err(format!("unexpected '{more}' at the end"));
    }
    if endpoint.qpn >= 1 << 24 || endpoint.psn >= 1 << 24 {
        return Err("qpn and psn have 24 bits".to_owned());
    }
    if words::mtu_number(endpoint.mtu).is_none() {
        return Err(format!("mtu is {}, expected 256, 512, 1024, 2048 or 4096", endpoint.mtu));
    }
    Ok(endpoint)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use verbs_kit::gid::Gid;

    use super::*;

    #[test]
    fn text_of_another_protocol_is_refused() {
        let good = "qpn=17 psn=5 gid=::ffff:10.9.9.1 lid=0 mtu=1024";
        assert_eq!(parse(good).expect("valid").to_string(), good);
        for (bad, why) in [
            ("", "expected qpn="),
            ("GET / HTTP/1.1", "expected qpn="),
            ("qpn=17 psn=5", "gid= is missing"),
            ("qpn=x psn=5 gid=::1 lid=0 mtu=1024", "qpn= has the value 'x'"),
            ("qpn=-1 psn=5 gid=::1 lid=0 mtu=1024", "qpn= has the value '-1'"),
            ("qpn=16777216 psn=5 gid=::1 lid=0 mtu=1024", "24 bits"),
            ("qpn=1 psn=16777216 gid=::1 lid=0 mtu=1024", "24 bits"),
            ("qpn=1 psn=5 gid=::1 lid=65536 mtu=1024", "lid= has the value"),
            ("qpn=1 psn=5 gid=::1 lid=0 mtu=1500", "mtu is 1500"),
            ("qpn=1 psn=5 gid=::1 lid=0 mtu=1024 x=1", "unexpected 'x=1'"),
        ] {
            let error = parse(bad).expect_err(bad);
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_can_be_read(qpn in 0u32..1 << 24, psn in 0u32..1 << 24, gid: [u8; 16], lid: u16, m in 1u32..=5) {
            let endpoint = Endpoint { qpn, psn, gid: Gid(gid), lid, mtu: 128 << m };
            prop_assert_eq!(parse(&endpoint.to_string()), Ok(endpoint));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = parse(&text);
        }
    }
}
