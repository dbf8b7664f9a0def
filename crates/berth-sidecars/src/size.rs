//! Sizes: Kubernetes' quantities as the bytes CSI speaks of, and back.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A quantity in bytes, rounded up; `None` if it is none, or more than CSI can say.
pub(crate) fn bytes(quantity: &Quantity) -> Option<i64> {
    quantity.0.parse::<berth_core::Quantity>().ok()?.bytes()
}

/// Bytes as Kubernetes writes them: the largest binary unit without a rest.
pub(crate) fn quantity(bytes: i64) -> Quantity {
    Quantity(berth_core::Quantity::from_bytes(bytes).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_in_all_their_spellings() {
        for (text, expected) in [
            ("1Gi", Some(1 << 30)),
            ("1.5Ki", Some(1536)),
            ("100M", Some(100_000_000)),
            ("1e3", Some(1000)),
            ("5E2", Some(500)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("1500m", Some(2)),
            ("0", Some(0)),
            (".5Ki", Some(512)),
            ("8Ei", None),
            ("", None),
            ("-1Gi", None),
            ("1Qi", None),
        ] {
            assert_eq!(bytes(&Quantity(text.to_owned())), expected, "{text:?}");
        }
    }

    #[test]
    fn bytes_are_written_in_the_largest_unit_without_a_rest() {
        for (bytes, expected) in [
            (0, "0"),
            (1, "1"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1 << 30, "1Gi"),
            (3 << 29, "1536Mi"),
            ((1 << 30) + 1, "1073741825"),
        ] {
            assert_eq!(quantity(bytes).0, expected);
        }
    }
}
