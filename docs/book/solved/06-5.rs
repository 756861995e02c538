fn take_in(&mut self) -> bool {
    let mut moved = false;
    while self.half.lost.is_none() && self.ready.len() < self.depth {
        let in_head = self.got < Header::BYTES;
        let len = bytemuck::cast::<_, Header>(self.head).len as usize;
        let rest = if in_head {
            &mut self.head[self.got..]
        } else {
            &mut bytemuck::cast_slice_mut(&mut self.body)[self.got - Header::BYTES..len]
        };
        let result = (&self.half.wire.0).read(rest);
        let n = self.half.moved(result);
        if n == 0 {
            break;
        }
        self.got += n;
        moved = true;
        let header: Header = bytemuck::cast(self.head);
        if in_head && self.got == Header::BYTES {
            if header.len as usize > self.half.max {
                self.half.lost = Some("a message that is too long".to_owned());
                break;
            }
            self.body = vec![0; (header.len as usize).div_ceil(8)];
        } else if self.got == Header::BYTES + header.len as usize {
            self.ready.push_back((header, std::mem::take(&mut self.body)));
            self.got = 0;
        }
    }
    moved
}
