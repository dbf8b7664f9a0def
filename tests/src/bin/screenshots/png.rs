//! Makes a picture small: 256 colours, which is more than a page of text and lines needs.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};

use anyhow::{Context as _, Result, ensure};
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;

const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";

type Colour = [u8; 3];

/// The same picture with a palette.
pub(crate) fn with_palette(png: &[u8]) -> Result<Vec<u8>> {
    let (width, pixels) = decoded(png)?;
    let mut counts: HashMap<Colour, usize> = HashMap::new();
    for pixel in &pixels {
        *counts.entry(*pixel).or_default() += 1;
    }
    let mut colours: Vec<(Colour, usize)> = counts.into_iter().collect();
    colours.sort_by_key(|(colour, count)| (std::cmp::Reverse(*count), *colour));
    let palette: Vec<Colour> = colours.iter().take(256).map(|(colour, _)| *colour).collect();
    let nearest = |colour: Colour| {
        let away = |known: &Colour| {
            (0..3).map(|at| i32::from(known[at]).abs_diff(i32::from(colour[at])).pow(2)).sum::<u32>()
        };
        let at = palette.iter().enumerate().min_by_key(|(_, known)| away(known)).map_or(0, |(at, _)| at);
        u8::try_from(at).unwrap_or(0)
    };
    let numbers: HashMap<Colour, u8> =
        colours.iter().map(|(colour, _)| (*colour, nearest(*colour))).collect();
    let mut lines = Vec::new();
    for line in pixels.chunks(width) {
        lines.push(0);
        lines.extend(line.iter().map(|pixel| numbers[pixel]));
    }
    let mut packed = ZlibEncoder::new(Vec::new(), Compression::best());
    packed.write_all(&lines)?;
    let height = u32::try_from(pixels.len() / width)?;
    let head = [&u32::try_from(width)?.to_be_bytes()[..], &height.to_be_bytes(), &[8, 3, 0, 0, 0]].concat();
    let mut out = SIGNATURE.to_vec();
    for (kind, data) in
        [(b"IHDR", head), (b"PLTE", palette.concat()), (b"IDAT", packed.finish()?), (b"IEND", Vec::new())]
    {
        out.extend(u32::try_from(data.len())?.to_be_bytes());
        let body = [&kind[..], &data].concat();
        let mut sum = flate2::Crc::new();
        sum.update(&body);
        out.extend(body);
        out.extend(sum.sum().to_be_bytes());
    }
    Ok(out)
}

/// The width and the pixels of a picture as browsers write it: eight bits per channel, not interlaced.
fn decoded(png: &[u8]) -> Result<(usize, Vec<Colour>)> {
    let mut rest = png.strip_prefix(SIGNATURE).context("no PNG")?;
    let (mut packed, mut head) = (Vec::new(), Vec::new());
    while rest.len() >= 12 {
        let length = u32::from_be_bytes(rest[..4].try_into()?) as usize;
        let (kind, data) = (&rest[4..8], rest.get(8..8 + length).context("it is cut off")?);
        match kind {
            b"IHDR" => head.extend(data),
            b"IDAT" => packed.extend(data),
            _ => {}
        }
        rest = &rest[12 + length..];
    }
    ensure!(head.len() == 13 && head[8] == 8 && head[12] == 0, "another kind of PNG: {head:?}");
    let channels = match head[9] {
        2 => 3,
        6 => 4,
        other => anyhow::bail!("another kind of colours: {other}"),
    };
    let width = u32::from_be_bytes(head[..4].try_into()?) as usize;
    let mut bytes = Vec::new();
    ZlibDecoder::new(&packed[..]).read_to_end(&mut bytes)?;
    let stride = width * channels;
    let mut before = vec![0_u8; stride];
    let mut pixels = Vec::new();
    for line in bytes.chunks(stride + 1) {
        let mut now = line[1..].to_vec();
        for at in 0..stride {
            let left = if at >= channels { now[at - channels] } else { 0 };
            let corner = if at >= channels { before[at - channels] } else { 0 };
            let add = match line[0] {
                0 => 0,
                1 => left,
                2 => before[at],
                3 => u8::try_from(u16::midpoint(u16::from(left), u16::from(before[at])))?,
                _ => paeth(left, before[at], corner),
            };
            now[at] = now[at].wrapping_add(add);
        }
        pixels.extend(now.chunks(channels).map(|pixel| [pixel[0], pixel[1], pixel[2]]));
        before = now;
    }
    Ok((width, pixels))
}

fn paeth(left: u8, above: u8, corner: u8) -> u8 {
    let guess = i16::from(left) + i16::from(above) - i16::from(corner);
    let away = |value: u8| (guess - i16::from(value)).abs();
    if away(left) <= away(above) && away(left) <= away(corner) {
        left
    } else if away(above) <= away(corner) {
        above
    } else {
        corner
    }
}
