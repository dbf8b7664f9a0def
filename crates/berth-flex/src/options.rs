//! The JSON document that most call-outs carry: the volume's own options, and what Kubernetes adds to them.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use berth_core::names::{
    FLEX_FS_GROUP, FLEX_FS_TYPE, FLEX_POD_NAME, FLEX_POD_NAMESPACE, FLEX_POD_UID, FLEX_READ_WRITE,
    FLEX_RESERVED_DOMAINS, FLEX_SECRET_PREFIX, FLEX_SERVICE_ACCOUNT, FLEX_VOLUME_NAME,
};

/// A flat map of texts. Its `Debug` shows no value of a Secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Options(BTreeMap<String, String>);

/// An option of a volume whose key is Kubernetes' own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("option {0:?} is reserved: keys of kubernetes.io and k8s.io are set by Kubernetes")]
pub struct ReservedOption(String);

/// What `mount` is given of the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodInfo {
    /// The name of the pod that uses the volume.
    pub name: String,
    /// The namespace that the pod is in.
    pub namespace: String,
    /// The uid of the pod.
    pub uid: String,
    /// The name of the pod's service account.
    pub service_account: String,
    /// The group that the pod's volumes belong to.
    pub fs_group: Option<u32>,
}

impl Options {
    /// What every call-out about a volume carries; `name` is the PersistentVolume's, or the volume's name in the pod.
    pub fn new(
        user: &BTreeMap<String, String>,
        fs_type: &str,
        read_only: bool,
        name: &str,
    ) -> Result<Self, ReservedOption> {
        if let Some(key) = user.keys().find(|key| is_reserved(key)) {
            return Err(ReservedOption(key.clone()));
        }
        let mut all = user.clone();
        all.insert(FLEX_FS_TYPE.to_owned(), fs_type.to_owned());
        all.insert(FLEX_READ_WRITE.to_owned(), if read_only { "ro" } else { "rw" }.to_owned());
        all.insert(FLEX_VOLUME_NAME.to_owned(), name.to_owned());
        Ok(Self(all))
    }

    /// Adds what `mount` is given of the pod: also what is empty, but no group where there is none.
    #[must_use]
    pub fn with_pod(mut self, pod: PodInfo) -> Self {
        let group = pod.fs_group.map(|group| (FLEX_FS_GROUP, group.to_string()));
        let fields = [
            (FLEX_POD_NAME, pod.name),
            (FLEX_POD_NAMESPACE, pod.namespace),
            (FLEX_POD_UID, pod.uid),
            (FLEX_SERVICE_ACCOUNT, pod.service_account),
        ];
        self.0.extend(fields.into_iter().chain(group).map(|(key, value)| (key.to_owned(), value)));
        self
    }

    /// Adds an entry of the volume's Secret, for `mount`.
    #[must_use]
    pub fn with_secret(mut self, key: &str, value: &[u8]) -> Self {
        self.0.insert(format!("{FLEX_SECRET_PREFIX}{key}"), STANDARD.encode(value));
        self
    }

    /// Reads the JSON document that call-outs get as their argument.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text).map(Self)
    }

    /// The value of an option or of a key that Kubernetes added; a Secret's is in base64.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// All keys and values, in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The volume's own options, without what Kubernetes added.
    pub fn own(&self) -> impl Iterator<Item = (&str, &str)> {
        self.iter().filter(|(key, _)| !is_reserved(key))
    }

    /// The entries of the volume's Secret, decoded; `None` for one that is not in base64.
    pub fn secrets(&self) -> impl Iterator<Item = (&str, Option<Vec<u8>>)> {
        let entries =
            self.iter().filter_map(|(key, value)| Some((key.strip_prefix(FLEX_SECRET_PREFIX)?, value)));
        entries.map(|(key, value)| (key, STANDARD.decode(value).ok()))
    }

    /// The document as Go writes it: compact, keys in the order of their bytes, and without `<`, `>` and `&`, as some
    /// drivers pass it on to a shell.
    pub fn to_json(&self) -> String {
        let text = serde_json::to_string(&self.0).expect("a map of texts is a JSON object");
        let mut escaped = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '<' => escaped.push_str("\\u003c"),
                '>' => escaped.push_str("\\u003e"),
                '&' => escaped.push_str("\\u0026"),
                '\u{2028}' => escaped.push_str("\\u2028"),
                '\u{2029}' => escaped.push_str("\\u2029"),
                c => escaped.push(c),
            }
        }
        escaped
    }

    /// The text without the values of the Secret, in base64 or plain, which a driver may have repeated.
    pub(crate) fn redact(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (_, encoded) in self.iter().filter(|(key, _)| key.starts_with(FLEX_SECRET_PREFIX)) {
            let plain = STANDARD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            for value in [Some(encoded.to_owned()), plain].into_iter().flatten() {
                if !value.trim().is_empty() {
                    text = text.replace(value.trim(), "***stripped***");
                }
            }
        }
        text
    }
}

/// Whether a key is in a domain of Kubernetes, whatever its case: the API server lets no volume have such an option.
fn is_reserved(key: &str) -> bool {
    let Some((domain, _)) = key.split_once('/') else { return false };
    let domain = domain.to_ascii_lowercase();
    FLEX_RESERVED_DOMAINS.iter().any(|reserved| {
        domain.strip_suffix(reserved).is_some_and(|before| before.is_empty() || before.ends_with('.'))
    })
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.iter().map(|(key, value)| {
            (key, if key.starts_with(FLEX_SECRET_PREFIX) { "***stripped***" } else { value })
        });
        f.debug_map().entries(shown).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(user: &[(&str, &str)]) -> Result<Options, ReservedOption> {
        let user = user.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Options::new(&user, "ext4", true, "pv")
    }

    #[test]
    fn the_document_is_written_as_go_writes_it() {
        let pod = PodInfo { name: "p".to_owned(), fs_group: Some(7), ..PodInfo::default() };
        let all =
            options(&[("share", "a&b<c>\"d\""), ("Z", "")]).unwrap().with_pod(pod).with_secret("k", b"v1");
        assert_eq!(
            all.to_json(),
            r#"{"Z":"","kubernetes.io/fsType":"ext4","kubernetes.io/mounterArgs.FsGroup":"7","kubernetes.io/pod.name":"p","kubernetes.io/pod.namespace":"","kubernetes.io/pod.uid":"","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"ro","kubernetes.io/secret/k":"djE=","kubernetes.io/serviceAccount.name":"","share":"a\u0026b\u003cc\u003e\"d\""}"#
        );
        let read = Options::parse(&all.to_json()).unwrap();
        assert_eq!(read, all);
        assert_eq!(read.own().collect::<Vec<_>>(), [("Z", ""), ("share", "a&b<c>\"d\"")]);
        assert_eq!(read.secrets().collect::<Vec<_>>(), [("k", Some(b"v1".to_vec()))]);
    }

    #[test]
    fn keys_of_kubernetes_are_refused_by_name() {
        for key in ["kubernetes.io/fsType", "Kubernetes.IO/x", "a.k8s.io/x", "k8s.io/", "b.a.kubernetes.io/x"]
        {
            assert!(options(&[(key, "")]).unwrap_err().to_string().contains(key));
        }
        for key in ["kubernetes.io", "mykubernetes.io/x", "x/kubernetes.io", "server"] {
            assert!(options(&[(key, "")]).is_ok(), "{key}");
        }
    }

    #[test]
    fn secrets_are_neither_formatted_nor_repeated() {
        let all = options(&[("share", "a")]).unwrap().with_secret("password", b"open sesame\n");
        let shown = format!("{all:?}");
        assert!(shown.contains("password") && shown.contains("share"), "{shown}");
        assert!(!shown.contains(&STANDARD.encode("open sesame\n")), "{shown}");
        let said = format!("mount -o pass=open sesame failed: {}", all.to_json());
        let said = all.redact(&said);
        assert!(!said.contains("sesame") && !said.contains(&STANDARD.encode("open sesame\n")), "{said}");
    }
}
