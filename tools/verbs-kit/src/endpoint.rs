//! The address that each QP must learn from its peer before the two can connect, as one line of text.

use std::fmt;
use std::str::FromStr;

use crate::gid::Gid;
use crate::words;

/// The address of one QP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// The QP's number: 24 bits, unique within its device.
    pub qpn: u32,
    /// The sequence number of its first packet: 24 bits.
    pub psn: u32,
    /// Address of its port.
    pub gid: Gid,
    /// Address of its port within an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// Largest payload of a packet, in bytes: 256 to 4096.
    pub mtu: u32,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Endpoint { qpn, psn, gid, lid, mtu } = self;
        write!(f, "qpn={qpn} psn={psn} gid={gid} lid={lid} mtu={mtu}")
    }
}

impl FromStr for Endpoint {
    type Err = String;

    /// Accepts exactly the output of `Display`: bytes of an unauthenticated peer must not become a QP's attributes.
    fn from_str(text: &str) -> Result<Endpoint, String> {
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
}

/// The next field, which must be `name=VALUE`.
pub fn field<'a, T: FromStr>(fields: &mut impl Iterator<Item = &'a str>, name: &str) -> Result<T, String> {
    let text = fields.next().ok_or_else(|| format!("{name}= is missing"))?;
    let value = text.strip_prefix(name).and_then(|t| t.strip_prefix('='));
    let value = value.ok_or_else(|| format!("expected {name}=, got '{text}'"))?;
    value.parse().map_err(|_| format!("{name}= has the value '{value}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_address_are_refused() {
        let good = "qpn=17 psn=5 gid=::ffff:10.9.9.1 lid=0 mtu=1024";
        assert_eq!(good.parse::<Endpoint>().expect("valid").to_string(), good);
        let more = format!("{good} x=1");
        let long = good.replace("qpn=17", "qpn=16777216");
        for bad in ["", "GET / HTTP/1.1", &good[..30], &more, &long, &good.replace("1024", "1500")] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }
}
